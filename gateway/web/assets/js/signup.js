// Making an account by oneself, where the operator allows it.

import { call, newKey, Problem } from './api.js';
import { detail } from './details.js';
import { $, copyButton, h } from './dom.js';
import { money, t } from './i18n.js';

// offerSignup shows the form below the one for keys, if people can sign up; enter is called with the new key once its owner
// has seen it.
export async function offerSignup(enter) {
  let terms;
  try {
    terms = await call('GET', '/v1/signup', { key: '' });
  } catch (error) {
    if (error instanceof Problem) return; // those who have a key need no other
    throw error;
  }
  if (!terms.open) return;
  const name = h('input', { type: 'text', id: 'signup-name', maxlength: '128', autocomplete: 'organization', 'aria-describedby': 'signup-error' });
  const fault = h('p', { class: 'error', id: 'signup-error', role: 'alert' });
  const submit = h('button', { type: 'submit' }, t('signup.submit'));
  const form = h('form', { id: 'signup-form', novalidate: true },
    h('h3', {}, t('signup.title')), h('p', {}, t('signup.text', { money: money(terms.credit_micros) })),
    h('label', { class: 'field', for: 'signup-name' }, h('span', {}, t('signup.name'))), h('div', { class: 'inline' }, name, submit), fault);
  let pending = null; // {body, key}: a request that was sent and has no answer yet
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    fault.textContent = '';
    name.removeAttribute('aria-invalid');
    submit.disabled = true;
    const body = JSON.stringify({ name: name.value });
    if (pending?.body !== body) pending = { body, key: newKey() }; // the same sign-up after a lost answer makes no second account
    try {
      const made = await call('POST', '/v1/signup', { key: '', body, headers: { 'Idempotency-Key': `"${pending.key}"` } });
      pending = null;
      form.replaceWith(shown(made.key.secret, enter));
    } catch (error) {
      if (error.status >= 400 && error.status < 500) pending = null;
      if (!(error instanceof Problem)) throw error;
      fault.replaceChildren(error.title, ...error.errors.flatMap((e) => [' ', detail(e)]));
      if (error.errors.length > 0) {
        name.setAttribute('aria-invalid', 'true');
        name.focus();
      }
    } finally {
      submit.disabled = false;
    }
  });
  name.addEventListener('input', () => name.removeAttribute('aria-invalid'));
  $('signup').replaceChildren(form);
}

// shown is the new key, until its owner goes on.
function shown(secret, enter) {
  const box = h('div', { id: 'signup-made', role: 'status', tabindex: '-1' }, h('p', {}, t('signup.made')),
    h('div', { class: 'inline' }, h('code', { class: 'secret', translate: 'no' }, secret), copyButton(t('word.copy'), t('word.copied'), () => secret)),
    h('button', { type: 'button', class: 'primary', on: { click: () => { box.remove(); enter(secret); } } }, t('signup.go')));
  queueMicrotask(() => box.focus());
  return box;
}
