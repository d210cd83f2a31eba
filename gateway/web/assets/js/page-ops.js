// /ops: the pools of machines, as operators see and size them.

import { account } from './account.js';
import { call, Problem } from './api.js';
import { detail } from './details.js';
import { $, h } from './dom.js';
import { bytes, date, duration, has, number, percent, t } from './i18n.js';
import { visible } from './visible.js';

const every = 2000; // milliseconds between two looks
const span = 300; // seconds of history
const step = 2; // seconds between two looks of it
const root = $('ops');
const lines = ['ready', 'leased', 'refilling', 'target', 'misses']; // of the history
const sizes = ['min_ready', 'max_ready', 'max_machines'];
const shown = new Map(); // by pool
let queues = null;
let timer = null;

const svg = (tag, properties) => {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  return node;
};

// table is a wide table with a head, which scrolls by itself.
const table = (head, body) => h('div', { class: 'table-box', tabindex: '0' }, h('table', { class: 'nodes' }, h('thead', {}, h('tr', {}, head.map((name) => h('th', { scope: 'col' }, t(`ops.${name}`))))), body));

// QueueCard is what the organisations have waiting and at work.
class QueueCard {
  constructor() {
    this.rows = h('tbody');
    this.note = h('p', { class: 'hint', role: 'status' });
    this.table = table(['org', 'queued', 'oldest', 'parked', 'work'], this.rows);
    this.node = h('section', { class: 'card pool queues', 'aria-label': t('ops.queues') }, h('h2', {}, t('ops.queues')), this.table, this.note);
  }

  update({ queues, total }) {
    this.table.hidden = queues.length === 0;
    this.rows.replaceChildren(...queues.map((q) => h('tr', { data: { org: q.org } },
      h('th', { scope: 'row' }, visible(q.name || q.org), ' ', h('code', { class: 'hint', translate: 'no' }, visible(q.org))),
      h('td', {}, number(q.queued)), h('td', {}, q.queued > 0 ? duration(1000 * q.oldest_seconds) : '–'), h('td', {}, number(q.parked)), h('td', {}, number(q.leased)))));
    const note = total === 0 ? t('ops.queues.none') : total > queues.length ? t('ops.queues.more', { n: total - queues.length }) : '';
    if (this.note.textContent !== note) this.note.textContent = note; // said once
  }
}

// past adds the histories of a pool's nodes up, by how long ago each look was. A node that has not been there as long counts from
// when it was.
function past(nodes) {
  const histories = nodes.map((n) => n.history).filter(Boolean);
  const end = Math.max(...histories.map((one) => Date.parse(one.end)));
  const all = [];
  for (const one of histories) {
    const late = Math.round((end - Date.parse(one.end)) / (1000 * step)); // looks that it lacks at the end
    for (const [i, ready] of one.ready.entries()) {
      const ago = late + one.ready.length - 1 - i;
      const sum = (all[ago] ??= { ready: 0, leased: 0, refilling: 0, target: 0, misses: 0 });
      sum.ready += ready;
      for (const name of ['leased', 'refilling', 'target']) sum[name] += one[name][i];
      sum.misses += i > 0 ? one.misses_total[i] - one.misses_total[i - 1] : 0;
    }
  }
  return Array.from(all, (sum) => sum ?? { ready: 0, leased: 0, refilling: 0, target: 0, misses: 0 }).reverse();
}

// PoolCard is one pool: gauges, history, nodes, and its size.
class PoolCard {
  constructor(name) {
    this.name = name;
    this.gauges = h('dl', { class: 'gauges' });
    this.chart = svg('svg', { viewBox: '0 0 300 60', preserveAspectRatio: 'none', class: 'history', role: 'img', 'aria-label': t('ops.history') });
    this.nodes = h('tbody');
    this.latencies = h('tbody');
    this.decisions = h('ul', { class: 'decisions' });
    this.fault = h('p', { class: 'error', role: 'alert' });
    this.said = h('span', { class: 'hint', role: 'status' });
    this.inputs = Object.fromEntries(sizes.map((size) => [size, h('input', { type: 'number', min: '0', max: '100000', class: 'number', id: `${name}-${size}` })]));
    this.form = h('form', { class: 'resize', novalidate: true, on: { submit: (e) => { e.preventDefault(); this.#resize(); } } },
      sizes.map((size) => h('div', {}, h('label', { for: `${name}-${size}` }, t(`ops.${size}`)), this.inputs[size])),
      h('button', { class: 'primary', type: 'submit' }, t('ops.resize')), this.said);
    this.load = Object.fromEntries([['claims_per_second', '1'], ['service_seconds', '2'], ['restore_seconds', '0.25']].map(([name, value]) => [name, h('input', { type: 'number', min: '0.001', step: 'any', class: 'number', id: `${this.name}-${name}`, value })]));
    this.predicted = h('dl', { class: 'gauges', 'aria-live': 'polite' });
    this.prediction = h('form', { class: 'resize', novalidate: true, on: { submit: (e) => { e.preventDefault(); this.#predict(); } } },
      Object.entries(this.load).map(([field, input]) => h('div', {}, h('label', { for: input.id }, t(`ops.${field}`)), input)),
      h('button', { type: 'submit' }, t('ops.predict')));
    const head = ['node', 'state', 'ready', 'leased', 'refilling', 'waiting', 'target', 'misses', 'wait', 'longest', 'failures'];
    this.node = h('section', { class: 'card pool', 'aria-label': name }, h('h2', {}, t('ops.pool'), ' ', h('code', { translate: 'no' }, visible(name))), this.gauges,
      h('h3', {}, t('ops.history')), this.chart, h('p', { class: 'legend' }, t('ops.history.text'), lines.map((name) => h('span', { class: name }, t(`ops.${name}`)))),
      h('h3', {}, t('ops.size')), this.form, this.fault, h('p', { class: 'hint' }, t('ops.predict.text')), this.prediction, this.predicted,
      h('h3', {}, t('ops.nodes')), table(head, this.nodes),
      h('h3', {}, t('ops.latencies')), h('p', { class: 'hint' }, t('ops.latencies.text')), table(['node', 'what', 'median', 'p95.short', 'p99.short', 'most', 'counted'], this.latencies),
      h('h3', {}, t('ops.decisions')), this.decisions);
  }

  update(pool) {
    const first = this.pool === undefined;
    this.pool = pool;
    const sum = (name) => pool.nodes.reduce((total, n) => total + n[name], 0);
    const claims = sum('claims_total');
    const miss = claims > 0 ? sum('misses_total') / claims : 0;
    const gauge = (name, value) => h('div', {}, h('dt', {}, t(`ops.${name}`)), h('dd', { data: { gauge: name } }, value));
    this.gauges.replaceChildren(...['ready', 'leased', 'refilling', 'waiting', 'target'].map((name) => gauge(name, number(pool[name]))),
      gauge('claims', number(claims)), gauge('misses', percent(miss)), gauge('wait', claims > 0 ? duration(1000 * sum('wait_seconds_total') / claims) : '–'));
    this.#draw(past(pool.nodes));
    this.nodes.replaceChildren(...pool.nodes.map((n) => h('tr', {}, h('th', { scope: 'row' }, h('code', { translate: 'no' }, visible(n.node))),
      h('td', {}, has(`ops.state.${n.state}`) ? t(`ops.state.${n.state}`) : visible(n.state), n.circuit !== 'closed' && h('span', { class: 'fault' }, ' ', visible(n.circuit_reason || n.circuit))),
      ['ready', 'leased', 'refilling', 'waiting', 'target'].map((name) => h('td', {}, number(n[name]))),
      h('td', {}, n.claims_total > 0 ? percent(n.misses_total / n.claims_total) : '–'), h('td', {}, n.claims_total > 0 ? duration(1000 * n.wait_seconds_total / n.claims_total) : '–'),
      h('td', {}, duration(1000 * n.longest_wait_seconds)), h('td', {}, number(n.make_failures_total)))));
    this.latencies.replaceChildren(...pool.nodes.flatMap((n) => [['claim', n.claim_latency], ['restore', n.restore_latency]].filter(([, l]) => l).map(([what, l]) => h('tr', { data: { latency: what } },
      h('th', { scope: 'row' }, h('code', { translate: 'no' }, visible(n.node))), h('td', {}, t(`ops.${what}`)),
      ['p50', 'p95', 'p99', 'max'].map((name) => h('td', {}, duration(1000 * l[`${name}_seconds`]))), h('td', {}, number(l.count))))));
    const decisions = pool.nodes.flatMap((n) => n.decisions).sort((a, b) => b.at.localeCompare(a.at)).slice(0, 6);
    this.decisions.replaceChildren(...decisions.map((d) => h('li', { lang: 'en' }, h('span', { class: 'hint' }, date(d.at)), ' ', h('strong', {}, visible(d.what)), ' ', visible(d.reason))));
    const restore = pool.nodes.map((n) => n.restore_latency?.p50_seconds).find((s) => s > 0);
    if (first && restore) this.load.restore_seconds.value = String(Number(restore.toPrecision(2))); // as it is here
    if (first) for (const size of sizes) this.inputs[size].value = String(pool.policy[size] ?? pool.nodes[0]?.settings[size] ?? '');
  }

  #draw(all) {
    const most = Math.max(1, ...all.flatMap((p) => [p.ready + p.leased, p.target]));
    const x = (i) => (300 * (1 - (all.length - 1 - i) * step / span)).toFixed(1); // the latest look is at the end
    const y = (value) => (58 - 56 * value / most).toFixed(1);
    const path = (name) => all.map((p, i) => `${i === 0 ? 'M' : 'L'}${x(i)} ${y(p[name])}`).join('');
    const missed = all.map((p, i) => (p.misses > 0 ? `M${x(i)} 60V${y(Math.min(most, p.misses))}` : '')).join('');
    this.chart.replaceChildren(svg('path', { d: missed, class: 'misses' }), ...['target', 'refilling', 'leased', 'ready'].map((name) => svg('path', { d: path(name), class: name })));
  }

  // predict asks the simulator what the size in the form would do under the load in the form.
  async #predict() {
    this.fault.textContent = '';
    const size = { memory_mib: this.pool.nodes[0]?.memory_mib || 512 };
    for (const [name, input] of [...Object.entries(this.inputs), ...Object.entries(this.load)]) size[name] = Number(input.value);
    try {
      const p = await call('POST', `/v1/pools/${encodeURIComponent(this.name)}/prediction`, { body: JSON.stringify(size) });
      const shown = [['misses', percent(p.miss_rate)], ['wait', duration(1000 * p.wait_mean_seconds)], ['p95', duration(1000 * p.wait_p95_seconds)], ['p99', duration(1000 * p.wait_p99_seconds)], ['memory', bytes(p.peak_memory_mib * 1048576)], ['max_machines', number(p.peak_machines)]];
      this.predicted.replaceChildren(...shown.map(([name, value]) => h('div', {}, h('dt', {}, t(`ops.${name}`)), h('dd', {}, value))));
    } catch (error) {
      this.#failed(error);
    }
  }

  #failed(error) {
    if (!(error instanceof Problem)) throw error;
    this.fault.replaceChildren(error.title, ...error.errors.flatMap((e) => [` ${e.field}: `, detail(e)]));
  }

  async #resize() {
    this.fault.textContent = '';
    this.said.textContent = '';
    const { set_at: _, ...policy } = this.pool.policy;
    for (const size of sizes) policy[size] = Number(this.inputs[size].value);
    try {
      this.update(await call('PUT', `/v1/pools/${encodeURIComponent(this.name)}`, { body: JSON.stringify(policy) }));
      this.said.textContent = t('ops.resized');
    } catch (error) {
      this.#failed(error);
    }
  }
}

async function look() {
  try {
    const [{ pools }, waiting] = await Promise.all([call('GET', '/v1/pools'), call('GET', '/v1/queues')]);
    if (!queues) root.append((queues = new QueueCard()).node);
    queues.update(waiting);
    for (const pool of pools) {
      if (!shown.has(pool.name)) {
        shown.set(pool.name, new PoolCard(pool.name));
        root.append(shown.get(pool.name).node);
      }
      shown.get(pool.name).update(pool);
    }
    $('ops-note').textContent = pools.length === 0 ? t('ops.none') : '';
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if ([401, 403].includes(error.status)) return operator.signedOut(error);
    $('ops-note').textContent = error.title;
  }
}

const operator = account({
  check: async (key) => {
    await call('GET', '/v1/pools', { key });
    return t('ops.signed');
  },
  onKey: () => {
    look();
    timer = setInterval(() => { if (!document.hidden) look(); }, every);
  },
  onNone: () => {
    clearInterval(timer);
    shown.clear();
    queues = null;
    root.replaceChildren(h('p', { id: 'ops-note', class: 'hint', role: 'status' }));
  },
});
