// /runs/{id}: one run of the key's organisation.

import { account, memberBalance } from './account.js';
import { Problem } from './api.js';
import { $, h } from './dom.js';
import { t } from './i18n.js';
import { ownerActions } from './run-actions.js';
import { ownRun, RunView } from './run-view.js';

const root = $('run');
const id = decodeURIComponent(location.pathname.split('/')[2]);
let view = null;

function problem(error) {
  if (!(error instanceof Problem)) throw error;
  if (error.status === 401) return member.signedOut(error);
  const note = h('p', { class: 'problem', role: 'alert' }, error.status === 404 ? t('run.missing') : error.title);
  if (view && error.status !== 404) root.prepend(note);
  else root.replaceChildren(note);
}

const member = account({
  check: memberBalance,
  onKey: (key) => {
    view = new RunView(root, { onProblem: problem });
    view.open(ownRun(id, key, ownerActions({ key, onProblem: problem })));
  },
  onNone: () => {
    view?.close();
    view = null;
    root.replaceChildren();
  },
});
