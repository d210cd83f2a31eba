// /: the playground. A request, what it may do, the programs that send it, and the run it becomes.

import { account, memberBalance } from './account.js';
import { call, newKey, Problem } from './api.js';
import { $, h } from './dom.js';
import { date, has, money, t, when } from './i18n.js';
import { RequestForm } from './request-form.js';
import { ownerActions } from './run-actions.js';
import { ownRun, RunView } from './run-view.js';
import { getKey } from './session.js';
import { offerSignup } from './signup.js';
import { Snippets } from './snippets.js';

const assets = new URL('..', import.meta.url);
const root = $('run');
const go = $('go');
const snippets = new Snippets($('snippets'));
const form = new RequestForm((request) => snippets.update(request));
let view = null;
let pending = null; // {body, key}: a request that was sent and has no answer yet

function problem(error) {
  if (!(error instanceof Problem)) throw error;
  if (error.status === 401) return member.signedOut(error);
  form.fault(error);
}

function show(id) {
  view?.close();
  view = new RunView(root, { onProblem: problem, onEnd: () => { recent(); } });
  history.replaceState(null, '', `#${id}`);
  return view.open(ownRun(id, getKey(), ownerActions({ key: getKey(), onProblem: problem, onPage: false })));
}

async function recent() {
  try {
    const { runs } = await call('GET', '/v1/runs?limit=5');
    $('recent-card').hidden = runs.length === 0;
    $('recent').replaceChildren(...runs.map((r) => h('li', {}, h('a', { href: `/runs/${r.id}` },
      h('span', { class: `state ${r.state}` }, t(`state.${r.state}`)),
      h('span', { class: 'recent-what' }, r.request?.command ?? r.request?.prompt ?? r.id),
      h('span', { class: 'hint', title: date(r.queued_at) }, `${money(r.money.charged_micros)} · ${when(r.queued_at)}`)))));
  } catch (error) {
    if (!(error instanceof Problem)) throw error; // the list is no reason to disturb
  }
}

$('request').addEventListener('submit', async (event) => {
  event.preventDefault();
  if (getKey() === '') {
    $('signin').scrollIntoView({ block: 'center' });
    $('signin-key').focus();
    return;
  }
  form.clear();
  go.disabled = true;
  const body = JSON.stringify(form.request());
  // The same request after a lost answer is the same run.
  if (pending?.body !== body) pending = { body, key: newKey() };
  try {
    const run = await call('POST', '/v1/runs', { body, headers: { 'Idempotency-Key': `"${pending.key}"` } });
    pending = null;
    show(run.id);
    if (matchMedia('(max-width: 899px)').matches || root.getBoundingClientRect().top < 0) root.scrollIntoView({ block: 'start' });
    memberBalance(getKey()).then((text) => { const shown = document.querySelector('.balance'); if (shown) shown.textContent = text; }, () => {});
  } catch (error) {
    if (error.status >= 400 && error.status < 500) pending = null;
    problem(error);
  } finally {
    go.disabled = false;
  }
});

async function offerExamples() {
  const examples = await (await fetch(new URL('examples.json', assets))).json();
  examples.push({ name: 'command', request: { command: 'uname -sr; whoami; curl -sS -m 8 https://example.com', timeout_seconds: 30, max_cost_micros: 20000 } });
  const choose = (example, button) => {
    for (const other of $('examples').children) other.setAttribute('aria-pressed', String(other === button));
    $('example-text').textContent = has(`example.${example.name}.text`) ? t(`example.${example.name}.text`) : '';
    form.fill(example.request);
  };
  const buttons = examples.map((example) => {
    const button = h('button', { type: 'button', class: 'chip', 'aria-pressed': 'false', data: { example: example.name }, on: { click: () => choose(example, button) } }, t(`example.${example.name}.title`));
    return button;
  });
  $('examples').replaceChildren(...buttons);
  if (!form.restore()) choose(examples[0], buttons[0]);
}

async function recorded() {
  const answer = await fetch(new URL('recorded.json', assets));
  if (!answer.ok || getKey() !== '') return;
  const { run, events } = await answer.json();
  view = new RunView(root, { onProblem: problem, before: [h('p', { class: 'note' }, t('play.recorded', { date: date(run.queued_at) }))] });
  view.openRecorded(run, events);
}

function empty() {
  view?.close();
  view = null;
  root.replaceChildren(h('div', { class: 'card empty' }, h('p', {}, t('play.empty'))));
}

empty();
const member = account({
  check: memberBalance,
  onKey: () => {
    const id = location.hash.slice(1);
    if (/^run_[0-9a-f]{32}$/.test(id)) show(id);
    else empty();
    recent();
  },
  onNone: () => {
    $('recent-card').hidden = true;
    empty();
    recorded();
    offerSignup((key) => member.enter(key));
  },
});
offerExamples();
