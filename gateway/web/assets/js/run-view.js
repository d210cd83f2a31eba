// One run: its head, costs, times, and timeline; live, or ended and replayable.

import { call, download } from './api.js';
import { copyButton, h } from './dom.js';
import { date, duration, has, money, percent, t } from './i18n.js';
import { markdown } from './markdown.js';
import { Replay } from './replay.js';
import { follow } from './stream.js';
import { Timeline } from './timeline.js';
import { output, visible } from './visible.js';

export const terminal = (state) => ['succeeded', 'failed', 'cancelled', 'timed_out', 'budget_exhausted'].includes(state);
// stages that most runs have, in the order of time: they keep the place until the record tells the run's own.
const stages = ['queue', 'claim', 'resume', 'prepare', 'files', 'worker', 'collect', 'destroy', 'settle'];
const refresh = 1000; // of the costs while the run is going, in milliseconds

// RunView fills root with one run at a time. source says where it is read: {run, events, key, owner, link}; see ownRun.
export class RunView {
  #stop = new AbortController();
  #record = null;
  #events = [];

  constructor(root, { onEnd = () => {}, onProblem, before = [] }) {
    this.before = before; // what stands above the run
    this.onEnd = onEnd;
    this.onProblem = onProblem;
    this.timeline = new Timeline({ result: (end) => this.#result(end), download: (path) => this.source.download?.(path) });
    this.replay = new Replay((ms) => this.#showAt(ms));
    this.#build();
    this.root = root;
    const beside = matchMedia('(min-width: 1060px)');
    const place = () => { this.facts.open = beside.matches && root.classList.contains('run-page'); };
    place();
    beside.addEventListener('change', place);
  }

  #build() {
    const cell = (name) => h('div', {}, h('dt', {}, t(`run.${name}`)), this[name] = h('dd', {}, '–'));
    this.state = h('span', { class: 'state' }, '');
    this.id = h('code', { class: 'run-id', translate: 'no' });
    this.model = h('span', { class: 'run-model', translate: 'no' });
    this.time = h('span', { class: 'run-time' });
    this.fill = h('div', { class: 'fill' });
    this.bar = h('div', { class: 'bar', role: 'meter', 'aria-label': t('run.budget'), 'aria-valuemin': '0' }, this.fill);
    this.spent = h('span', { class: 'spent' });
    this.link = h('span', { class: 'link', role: 'status' });
    this.actions = h('div', { class: 'actions' });
    this.say = h('p', { class: 'sr', role: 'status' });
    this.replay.setEnabled(false);
    this.stageBar = h('div', { class: 'stage-bar', 'aria-hidden': 'true' });
    this.stageList = h('dl', { class: 'stages' });
    this.node = h('article', { class: 'run' },
      h('header', { class: 'card run-head' },
        h('div', { class: 'run-line' }, this.state, h('span', { class: 'run-id-box' }, this.id, copyButton(t('word.copy'), t('word.copied'), () => this.id.textContent))),
        h('div', { class: 'run-line run-sub' }, this.model, this.time),
        h('div', { class: 'budget' }, this.bar, this.spent), this.say),
      this.facts = h('details', { class: 'card facts' }, h('summary', {}, t('run.facts')), h('div', { class: 'facts-body' },
        h('section', {}, h('h2', {}, t('run.costs')), h('dl', { class: 'costs' }, ['model_cost', 'web_cost', 'compute_cost', 'charged', 'released'].map(cell))),
        h('section', {}, h('h2', {}, t('run.times')), this.stageBar, this.stageList),
        h('section', {}, h('h2', {}, t('run.machine')), h('dl', { class: 'costs' }, ['machine', 'dropped', 'queued_at', 'isolation'].map(cell))))),
      h('section', { class: 'card run-log' },
        h('div', { class: 'run-tools' }, h('h2', {}, t('timeline.label')), this.link, this.actions), this.replay.node, this.timeline.list));
  }

  close() { this.#stop.abort(); this.replay.stop(); }

  // open shows a run from the beginning.
  async open(source) {
    this.close();
    this.#stop = new AbortController();
    const { signal } = this.#stop;
    this.source = source;
    this.timeline.clear();
    this.#events = [];
    this.replay.setEnabled(false);
    this.link.textContent = '';
    try {
      this.#take(await source.run(signal));
      if (terminal(this.#record.state)) await this.#whole(signal);
      else await this.#live(signal);
    } catch (error) {
      if (!signal.aborted) this.onProblem(error);
    }
  }

  // openRecorded shows a run that was kept in a file.
  openRecorded(record, events) {
    this.source = {};
    this.#take(record);
    for (const event of events) this.#push(event);
    this.#ended();
  }

  async #whole(signal) {
    for (let after = 0; after !== undefined;) {
      const page = await call('GET', `${this.source.events}?after=${after}`, { key: this.source.key, signal });
      for (const event of page.events) this.#push(event);
      after = page.next_after;
    }
    this.#ended();
  }

  async #live(signal) {
    const poll = setInterval(() => this.#poll(signal), refresh);
    const tick = setInterval(() => this.#tick(), 100);
    try {
      let last = Promise.resolve();
      await follow(this.source.events, {
        key: this.source.key,
        signal,
        onLink: (link) => this.#linked(link),
        onEvent: (event) => { last = last.then(() => this.#arrived(event, signal)); },
      });
      await last;
      if (signal.aborted) return;
      this.#take(await this.source.run(signal));
      this.#ended();
    } finally {
      clearInterval(poll);
      clearInterval(tick);
    }
  }

  // arrived shows a live event. The end of a run is shown with its result, which is in the record.
  async #arrived(event, signal) {
    if (terminal(event.type)) this.#take(await this.source.run(signal).catch(() => this.#record));
    this.#push(event);
  }

  async #poll(signal) {
    try {
      this.#take(await this.source.run(signal));
    } catch { /* the stream tells of what is wrong */ }
  }

  #push(event) {
    this.#events.push(event);
    this.timeline.push(event);
    const d = event.data ?? {};
    if (event.type === 'microvm.ready') {
      this.machine.replaceChildren(h('code', { translate: 'no' }, visible(d.machine ?? '–')));
      this.isolation.textContent = d.isolation === 'emulated' ? t('run.emulated') : 'KVM';
    }
    if (event.type === 'microvm.destroyed') this.dropped.textContent = t('run.packets', { n: d.dropped_packets });
  }

  #linked(link) {
    this.link.className = `link ${link}`;
    this.link.textContent = t(`link.${link}`);
  }

  #ended() {
    this.link.textContent = '';
    this.link.className = 'link';
    this.replay.load(this.timeline.end);
    this.replay.setEnabled(true);
    this.#actions();
    this.onEnd(this.#record);
  }

  // take shows the record.
  #take(record) {
    if (!this.node.isConnected) this.root.replaceChildren(...this.before, this.node); // whole from the start: nothing moves later
    const before = this.#record?.id === record.id ? this.#record : null;
    this.#record = record;
    if (before?.state !== record.state) {
      this.node.dataset.state = record.state;
      this.state.textContent = t(`state.${record.state}`);
      this.state.className = `state ${record.state}`;
      this.say.textContent = t('run.is', { state: t(`state.${record.state}`) });
      this.#actions();
    }
    this.id.textContent = record.id;
    this.model.textContent = record.request?.model || t('run.command');
    this.queued_at.textContent = date(record.queued_at);
    this.#costs(record.money, record.money.charged_micros);
    if (record.stages || !before) this.#stages(record.stages);
    this.#tick();
  }

  #tick() {
    const r = this.#record;
    const end = r.ended_at ? new Date(r.ended_at) : Date.now();
    this.time.textContent = duration(Math.max(0, end - new Date(r.queued_at)));
  }

  #costs(m, charged) {
    const share = m.reserved_micros > 0 ? charged / m.reserved_micros : 0;
    this.fill.style.setProperty('--share', String(Math.min(1, share)));
    this.bar.setAttribute('aria-valuemax', String(m.reserved_micros));
    this.bar.setAttribute('aria-valuenow', String(charged));
    this.spent.textContent = t('run.spent', { charged: money(charged), reserved: money(m.reserved_micros) });
    this.bar.setAttribute('aria-valuetext', this.spent.textContent);
    this.bar.classList.toggle('full', share >= 0.9);
    this.model_cost.textContent = money(m.model_micros);
    this.web_cost.textContent = money(m.web_micros);
    this.compute_cost.textContent = money(m.compute_micros);
    this.charged.textContent = money(m.charged_micros);
    this.released.textContent = terminal(this.#record.state) ? money(m.released_micros) : '–';
  }

  // stages shows where the time went: what the record lists and nothing else, in its order, which is that of time.
  #stages(list) {
    const sum = list?.reduce((total, s) => total + s.ms, 0) || 1;
    this.stageBar.replaceChildren(...(list ?? []).map((s) => {
      const part = h('span', { data: { stage: s.name } });
      part.style.setProperty('flex-grow', String(s.ms / sum));
      return part;
    }));
    this.stageList.replaceChildren(...(list ?? stages.map((name) => ({ name }))).map((s) => h('div', {},
      h('dt', { data: { stage: s.name } }, has(`stage.${s.name}`) ? t(`stage.${s.name}`) : visible(s.name)),
      s.ms === undefined ? h('dd', {}, '–') : h('dd', {}, duration(s.ms), h('span', { class: 'hint' }, ` ${percent(s.ms / sum)}`)))));
  }

  // showAt shows the run as it was ms after it was queued.
  #showAt(ms) {
    this.timeline.showUntil(ms);
    this.#costs(this.#record.money, Number.isFinite(ms) ? this.#chargedAt(ms) : this.#record.money.charged_micros);
  }

  // chargedAt is what was charged by then: calls when they were made, compute evenly while the machine was there.
  #chargedAt(ms) {
    const at = (type) => this.#events.find((e) => e.type === type)?.at_ms;
    const from = at('microvm.ready') ?? 0;
    const to = at('microvm.destroyed') ?? this.timeline.end;
    const calls = this.#events.filter((e) => e.at_ms <= ms).reduce((sum, e) => sum + (['model', 'web', 'connection'].includes(e.type) ? e.data?.charged_micros ?? 0 : 0), 0);
    const used = to > from ? Math.min(1, Math.max(0, (ms - from) / (to - from))) : 1;
    return Math.min(this.#record.money.charged_micros, calls + Math.round(this.#record.money.compute_micros * used));
  }

  // result is what the run left: the worker's answer, or the command's output.
  #result(end) {
    const r = this.#record.result ?? {};
    const text = end.output || r.output;
    const parts = [];
    if (text) parts.push(markdown(text));
    for (const name of ['stdout', 'stderr']) {
      if (r[name]?.content) parts.push(h('div', { class: 'stream' }, h('h3', {}, t(`result.${name}`)), output(r[name], t(`result.${name}`))));
    }
    if (parts.length === 0) return null;
    return h('section', { class: 'result', 'aria-label': t('result.label') }, parts);
  }

  #actions() {
    this.actions.replaceChildren(...(this.source.actions?.(this.#record) ?? []));
  }
}

// ownRun is the source of a run of the key's organisation.
export function ownRun(id, key, actions) {
  const path = `/v1/runs/${encodeURIComponent(id)}`;
  return {
    run: (signal) => call('GET', path, { key, signal }),
    events: `${path}/events`,
    key,
    actions,
    download: (name) => download(`${path}/files/${name.split('/').map(encodeURIComponent).join('/')}`, name.split('/').at(-1), key),
  };
}
