// The list of a run's events. Rows are made in batches, one a frame; groups of them that are outside the window are not laid
// out (content-visibility), and details are made when they are opened, so that ten thousand events stay smooth. A browser
// watches each group by itself in every frame: many rows in a group keep that cheap.

import { h } from './dom.js';
import { bytes, clock, duration, has, money, number, t, tn } from './i18n.js';
import { line, output, visible } from './visible.js';

const batch = 150; // rows a frame
const size = 25; // rows of a group, as style.css knows

export class Timeline {
  #rows = []; // {node, at, group}
  #groups = []; // {node, rows, shown}
  #waiting = [];
  #scheduled = false;
  #shown = 0; // rows that are not hidden
  #limit = Infinity; // milliseconds; rows later than this are hidden
  #last = 0;

  // result makes the element for the event that ends a run; download saves a file that the run left, where that may be.
  constructor(context) {
    this.list = h('div', { class: 'timeline', role: 'list', 'aria-label': t('timeline.label') });
    this.context = context;
    this.onChange = () => {};
  }

  get length() { return this.#rows.length + this.#waiting.length; }
  get end() { return this.#last; }

  clear() {
    this.#rows = [];
    this.#groups = [];
    this.#waiting = [];
    this.#shown = 0;
    this.#last = 0;
    this.#limit = Infinity;
    this.list.replaceChildren();
  }

  push(event) {
    this.#waiting.push(event);
    this.#last = Math.max(this.#last, event.at_ms);
    if (this.#scheduled) return;
    this.#scheduled = true;
    frame(() => this.#flush());
  }

  #flush() {
    this.#scheduled = false;
    const following = atBottom();
    for (const event of this.#waiting.splice(0, batch)) {
      const entry = { node: row(event, this.context), at: event.at_ms, group: this.#group() };
      entry.group.rows++;
      entry.group.node.append(entry.node);
      this.#rows.push(entry);
      entry.node.hidden = entry.at > this.#limit;
      if (!entry.node.hidden) this.#show(entry, true);
    }
    if (following) window.scrollTo({ top: document.documentElement.scrollHeight });
    this.onChange();
    if (this.#waiting.length > 0) {
      this.#scheduled = true;
      frame(() => this.#flush());
    }
  }

  // group is the one that the next row belongs to.
  #group() {
    let group = this.#groups.at(-1);
    if (!group || group.rows === size) {
      group = { node: h('div', { class: 'rows', role: 'none' }), rows: 0, shown: 0 };
      this.#groups.push(group);
      this.list.append(group.node);
    }
    return group;
  }

  // show shows or hides a row. A group may be left out of the layout only while its height can be foretold.
  #show({ node, group }, on) {
    node.hidden = !on;
    this.#shown += on ? 1 : -1;
    group.shown += on ? 1 : -1;
    group.node.classList.toggle('full', group.shown === size);
  }

  // showUntil hides what happened later than ms after the run was queued.
  showUntil(ms) {
    this.#limit = ms;
    const following = atBottom();
    while (this.#shown < this.#rows.length && this.#rows[this.#shown].at <= ms) this.#show(this.#rows[this.#shown], true);
    while (this.#shown > 0 && this.#rows[this.#shown - 1].at > ms) this.#show(this.#rows[this.#shown - 1], false);
    if (following && Number.isFinite(ms)) window.scrollTo({ top: document.documentElement.scrollHeight });
  }
}

// frame calls f before the next frame, or soon where there are no frames: in a tab that is not looked at.
function frame(f) {
  let called = false;
  const once = () => { if (!called) { called = true; f(); } };
  requestAnimationFrame(once);
  setTimeout(once, 200);
}

// atBottom tells whether a person looks at the end of a page that is longer than the window.
function atBottom() {
  const e = document.documentElement;
  return e.scrollTop > 0 && e.scrollHeight - e.scrollTop - e.clientHeight < 60;
}

const meta = (...parts) => h('span', { class: 'meta' }, parts.filter(Boolean).map((p) => h('span', {}, p)));

// row makes the row of one event.
function row(event, context) {
  const known = describe[event.type] ?? (ends.has(event.type) ? describeEnd : describeUnknown);
  const { tone, content, extra } = known(event.data ?? {}, event, context);
  const kind = has(`event.${event.type}`) ? t(`event.${event.type}`) : h('code', {}, visible(event.type.slice(0, 64)));
  return h('div', { class: `event ${tone ?? ''}`, role: 'listitem', data: { type: event.type, seq: event.seq } },
    h('time', { class: 'at', title: t('timeline.since', { time: duration(event.at_ms) }) }, clock(event.at_ms)),
    h('div', { class: 'what' }, h('div', { class: 'line' }, h('span', { class: 'kind' }, kind), content), extra));
}

// details is an element that opens; its body is made when it is opened first.
function details(summary, body) {
  const node = h('details', {}, h('summary', {}, summary));
  node.addEventListener('toggle', () => { if (node.open && node.childElementCount === 1) node.append(h('div', { class: 'body' }, body())); });
  return node;
}

const ends = new Set(['succeeded', 'failed', 'cancelled', 'timed_out', 'budget_exhausted']);
const onOff = (on) => t(on ? 'word.on' : 'word.off');

const describe = {
  queued: (d) => ({ content: [h('span', {}, t('timeline.reserved', { money: money(d.reserved_micros) })), meta(d.position > 1 && t('timeline.place', { position: number(d.position) }), d.estimated_wait_ms > 0 && t('timeline.wait', { time: duration(d.estimated_wait_ms) }))] }),
  'microvm.ready': (d) => ({ tone: 'machine', content: [meta(h('code', { translate: 'no' }, visible(d.machine ?? '')), d.isolation === 'emulated' && t('run.emulated'), d.isolation === 'kvm' && 'KVM')] }),
  'worker.started': (d) => ({ tone: 'machine', content: meta(t('timeline.shell', { state: onOff(d.shell) }), t('timeline.web', { state: onOff(d.web) })) }),
  model: (d) => ({
    tone: d.error ? 'model bad' : 'model',
    content: [h('code', { translate: 'no' }, visible(d.model ?? '')), meta(t('timeline.tokens', { input: number(d.input_tokens), output: number(d.output_tokens) }), duration(d.duration_ms), money(d.charged_micros), d.estimated && t('timeline.estimated'), d.receipt && t('timeline.signed'))],
    extra: d.error && h('p', { class: 'fault' }, visible(d.error)),
  }),
  shell: shellRow,
  web: callRow,
  connection: callRow,
  files: filesRow,
  'budget.warning': (d) => ({ tone: 'warn', content: h('span', {}, t('timeline.warning', { charged: money(d.charged_micros), reserved: money(d.reserved_micros) })) }),
  'broker.refused': (d) => ({ tone: 'call bad', content: [h('code', { translate: 'no' }, visible(d.code ?? '')), meta(t('timeline.times', { n: d.count ?? 1 }))] }),
  'microvm.destroyed': (d) => ({
    tone: d.dropped_packets > 0 ? 'machine warn' : 'machine',
    content: h('span', { class: d.dropped_packets > 0 ? 'dropped' : 'hint' }, d.dropped_packets > 0 ? t('timeline.dropped', { n: d.dropped_packets, size: bytes(d.dropped_bytes) }) : t('timeline.nothing')),
  }),
  'worker.destroyed': (d) => ({
    tone: 'last',
    content: h('span', {}, t('timeline.settled', { charged: money(d.charged_micros), released: money(d.released_micros) })),
    extra: h('p', { class: 'hint split-costs' }, t('timeline.costs', { model: money(d.model_micros), web: money(d.web_micros), compute: money(d.compute_micros) })),
  }),
};

function shellRow(d) {
  const failed = d.outcome !== 'exited' || d.exit_code !== 0;
  const command = d.command ?? '';
  const said = d.outcome === 'exited' ? t('timeline.exit', { code: number(d.exit_code) }) : t(`outcome.${d.outcome}`);
  const summary = [h('code', { class: 'command', dir: 'ltr', translate: 'no' }, command ? ['$ ', ...line(command)] : t('timeline.kept')), meta(h('span', { class: failed ? 'exit bad' : 'exit' }, said), duration(d.duration_ms), bytes(d.bytes))];
  return {
    tone: 'shell',
    extra: details(summary, () => [
      command && h('pre', { class: 'output', dir: 'ltr', tabindex: '0', role: 'group', 'aria-label': t('timeline.command'), translate: 'no' }, '$ ', visible(command)),
      d.output ? output({ content: d.output, ...d }, t('timeline.output')) : h('p', { class: 'hint' }, d.bytes > 0 ? t('timeline.unkept') : t('timeline.silent')),
    ]),
  };
}

function callRow(d) {
  const bad = Boolean(d.error) || d.status >= 400 || d.status === 0;
  return {
    tone: bad ? 'call bad' : 'call',
    content: [h('code', { dir: 'ltr', translate: 'no' }, visible(`${d.method ?? ''} ${d.target ?? ''}`.trim())), meta(d.status > 0 && h('span', { class: bad ? 'exit bad' : 'exit' }, String(d.status)), bytes(d.bytes), duration(d.duration_ms), d.charged_micros > 0 && money(d.charged_micros), d.receipt && t('timeline.signed'))],
    extra: d.error && h('p', { class: 'fault' }, visible(d.error)),
  };
}

// filesRow lists what the run left in out/.
function filesRow(d, event, { download }) {
  const names = d.names ?? [];
  const list = () => h('ul', { class: 'files' }, names.map((file) => h('li', {}, h('code', { dir: 'ltr', translate: 'no' }, visible(file.path)), h('span', { class: 'hint' }, bytes(file.size)),
    download && h('button', { type: 'button', class: 'quiet', on: { click: (e) => save(e.target, () => download(file.path)) } }, t('files.download'), h('span', { class: 'sr' }, file.path)))));
  const notes = [t('files.count', { n: d.count ?? 0, size: bytes(d.bytes ?? 0) }), d.skipped > 0 && t('files.skipped', { n: d.skipped }), d.truncated && t('files.truncated')];
  return {
    tone: d.error ? 'machine bad' : 'machine',
    content: d.error ? h('span', { class: 'fault' }, t('files.failed')) : meta(...notes),
    extra: names.length > 0 ? list() : null,
  };
}

async function save(button, action) {
  button.disabled = true;
  try {
    await action();
  } catch (error) {
    button.after(h('span', { class: 'error', role: 'alert' }, error.title ?? error.message));
  } finally {
    button.disabled = false;
  }
}

function describeEnd(d, event, { result }) {
  return {
    tone: event.type === 'succeeded' ? 'end good' : 'end bad',
    content: meta(d.model_calls > 0 && t('timeline.calls', { n: d.model_calls }), d.model_calls > 0 && t('timeline.total', { n: d.tokens }), d.exit_code !== undefined && t('timeline.exit', { code: number(d.exit_code) })),
    extra: [
      d.error && h('p', { class: 'fault' }, has(`fault.${d.error.code}`) ? t(`fault.${d.error.code}`) : h('code', {}, visible(d.error.code)), d.error.detail && h('span', { class: 'fault-detail', lang: 'en', dir: 'auto' }, visible(d.error.detail))),
      result(d),
    ],
  };
}

// describeUnknown shows an event that this page has no words for: its type, and its data to look at.
function describeUnknown(d) {
  const empty = Object.keys(d).length === 0;
  return {
    content: h('span', { class: 'hint' }, tn('timeline.unknown', {})),
    extra: empty ? null : details(t('timeline.data'), () => output({ content: JSON.stringify(d, null, 2) }, t('timeline.data'))),
  };
}
