// Calls of the public API.

import { has, t } from './i18n.js';
import { getKey } from './session.js';

// Problem is a refusal: problem details (RFC 9457), or the lack of any answer (code "unreachable").
export class Problem extends Error {
  constructor(body, status) {
    super(body.detail);
    this.code = body.code;
    this.status = status;
    this.errors = body.errors ?? [];
    this.requestId = body.request_id;
  }

  // title says what is wrong in the language of the page.
  get title() { return has(`problem.${this.code}`) ? t(`problem.${this.code}`) : this.message; }
}

export const unreachable = () => new Problem({ code: 'unreachable', detail: '' }, 0);

// readProblem makes a Problem of an answer that is no success.
export async function readProblem(answer) {
  try {
    const body = await answer.json();
    if (typeof body.code === 'string') return new Problem(body, answer.status);
  } catch { /* no problem document: a proxy's answer */ }
  return new Problem({ code: answer.status >= 500 ? 'unavailable' : 'bad_request', detail: `HTTP ${answer.status}` }, answer.status);
}

// call sends a request and returns the decoded answer, null for 204; it throws a Problem.
export async function call(method, path, { body, headers, key = getKey(), signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      signal,
      cache: 'no-store',
      headers: {
        Accept: 'application/json',
        ...(key && { Authorization: `Bearer ${key}` }),
        ...(body !== undefined && { 'Content-Type': 'application/json' }),
        ...headers,
      },
      body,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw unreachable();
  }
  if (!answer.ok) throw await readProblem(answer);
  return answer.status === 204 ? null : answer.json();
}

// newKey is an idempotency key. Pages that are not served securely have no randomUUID.
export const newKey = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, '0')).join('');

// download saves a file that only the key may fetch. It is saved and never shown: untrusted code wrote it.
export async function download(path, name, key) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${key}` }, cache: 'no-store' });
  if (!answer.ok) throw await readProblem(answer);
  const address = URL.createObjectURL(new Blob([await answer.blob()], { type: 'application/octet-stream' }));
  const link = document.createElement('a');
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
