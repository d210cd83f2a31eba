// Signing in with a key, and out.

import { call, Problem } from './api.js';
import { $, h } from './dom.js';
import { money, t } from './i18n.js';
import { dropKey, getKey, setKey } from './session.js';

// account watches over the key of the page. check(key) asks the server for what the key opens and resolves to a line for
// the header; onKey is called with the key each time one was accepted, onNone when there is none.
export function account({ check, onKey, onNone }) {
  const box = $('account');
  const panel = $('signin');
  const input = $('signin-key');
  const fault = $('signin-error');

  function signedOut(problem) {
    dropKey();
    box.replaceChildren();
    panel.hidden = false;
    fault.textContent = problem ? problem.title : '';
    input.toggleAttribute('aria-invalid', Boolean(problem));
    if (problem) input.setAttribute('aria-invalid', 'true');
    onNone();
  }

  async function enter(key) {
    try {
      const shown = await check(key);
      setKey(key);
      panel.hidden = true;
      input.value = '';
      fault.textContent = '';
      input.removeAttribute('aria-invalid');
      const out = h('button', { type: 'button', class: 'quiet', on: { click: () => { signedOut(); input.focus(); } } }, t('account.out'));
      box.replaceChildren(h('span', { class: 'balance' }, shown), out);
      onKey(key);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if ([401, 403].includes(error.status)) return signedOut(error);
      // The key may well be right: the server is away.
      panel.hidden = false;
      fault.textContent = error.title;
    }
  }

  $('signin-form').addEventListener('submit', (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (key === '') {
      fault.textContent = t('signin.empty');
      input.setAttribute('aria-invalid', 'true');
      input.focus();
      return;
    }
    enter(key).then(() => { if (!panel.hidden) input.focus(); });
  });

  if (getKey() === '') signedOut();
  else enter(getKey());
  return { enter, signedOut };
}

// memberBalance checks a member key and says what its organisation can spend.
export async function memberBalance(key) {
  const a = await call('GET', '/v1/account', { key });
  return t('account.available', { money: money(a.available_micros) });
}
