// Follows a run's events over server-sent events (WHATWG HTML, section 9.2), with the key in a header, which EventSource
// cannot send. A broken stream is resumed after the last event that was seen.

import { Problem, readProblem } from './api.js';

const silence = 45000; // the server sends a heartbeat every 15 s
const longest = 10000; // between two attempts

// follow calls onEvent for every event after the given one, until the last of the run. onLink is told 'live' or 'lost'.
// It returns at the run's end, and throws a Problem when the server refuses.
export async function follow(path, { key, after = 0, signal, onEvent, onLink }) {
  let failures = 0;
  for (;;) {
    try {
      const ended = await attempt(path, { key, after, signal, onOpen: () => { failures = 0; onLink('live'); }, onEvent: (e) => { after = e.seq; onEvent(e); } });
      if (ended) return;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status < 500 && error.status !== 429) throw error;
    }
    if (signal.aborted) return;
    onLink('lost');
    await pause(Math.min(longest, 500 * 2 ** failures++), signal);
  }
}

// pause waits, but not longer than the browser is offline or the signal is silent.
function pause(ms, signal) {
  return new Promise((resolve) => {
    const done = () => { clearTimeout(timer); window.removeEventListener('online', done); signal.removeEventListener('abort', done); resolve(); };
    const timer = setTimeout(done, ms);
    window.addEventListener('online', done);
    signal.addEventListener('abort', done);
  });
}

// attempt reads one stream and tells whether the run ended.
async function attempt(path, { key, after, signal, onOpen, onEvent }) {
  const quiet = new AbortController();
  const abort = () => quiet.abort();
  signal.addEventListener('abort', abort);
  let timer = setTimeout(abort, silence);
  try {
    const headers = { Accept: 'text/event-stream', Authorization: `Bearer ${key}` };
    if (after > 0) headers['Last-Event-ID'] = String(after);
    const answer = await fetch(path, { headers, cache: 'no-store', signal: quiet.signal });
    if (answer.status === 204) return true;
    if (!answer.ok) throw await readProblem(answer);
    onOpen();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new Parser();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false;
      clearTimeout(timer);
      timer = setTimeout(abort, silence);
      for (const data of parser.push(value)) {
        const event = JSON.parse(data);
        if (event.seq <= after) continue;
        onEvent(event);
        if (event.type === 'worker.destroyed') return true;
      }
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener('abort', abort);
    quiet.abort();
  }
}

// Parser splits a stream into the data of its messages.
export class Parser {
  #parts = []; // of the line that has not ended
  #data = [];

  * push(chunk) {
    const lines = chunk.split('\n');
    for (let i = 0; i < lines.length - 1; i++) {
      this.#parts.push(lines[i]);
      const line = this.#parts.join('');
      this.#parts = [];
      if (line === '') {
        if (this.#data.length > 0) yield this.#data.join('\n');
        this.#data = [];
      } else if (line.startsWith('data:')) this.#data.push(line.slice(line[5] === ' ' ? 6 : 5));
    }
    if (lines.at(-1) !== '') this.#parts.push(lines.at(-1));
  }
}
