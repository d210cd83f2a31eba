// /shared#TOKEN: one run, for whoever has the link. The token stands behind the hash, so no server's log ever has it.

import { call, Problem } from './api.js';
import { $, h } from './dom.js';
import { t } from './i18n.js';
import { RunView } from './run-view.js';

const root = $('run');
const key = location.hash.slice(1);

function problem(error) {
  if (!(error instanceof Problem)) throw error;
  const gone = [401, 403, 404].includes(error.status);
  root.replaceChildren(h('p', { class: 'problem', role: 'alert' }, gone ? t('shared.gone') : error.title));
}

window.addEventListener('hashchange', () => location.reload());
new RunView(root, { onProblem: problem }).open({ run: (signal) => call('GET', '/v1/shared', { key, signal }), events: '/v1/shared/events', key });
