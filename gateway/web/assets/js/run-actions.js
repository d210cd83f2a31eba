// What the owner of a run may do with it: cancel it, and share it.

import { call } from './api.js';
import { copyButton, h } from './dom.js';
import { date, t } from './i18n.js';
import { terminal } from './run-view.js';

const hour = 3600;
const lifetimes = [['share.hour', hour], ['share.day', 24 * hour], ['share.week', 7 * 24 * hour]];

// ownerActions returns the buttons for a run, as RunView's source wants them.
export function ownerActions({ key, onProblem, onPage = true }) {
  return (record) => {
    const path = `/v1/runs/${record.id}`;
    const buttons = [];
    if (!terminal(record.state)) {
      const cancel = h('button', { type: 'button', class: 'quiet danger', on: { click: async () => {
        cancel.disabled = true;
        try {
          await call('POST', `${path}/cancel`, { key });
        } catch (error) {
          cancel.disabled = false;
          onProblem(error);
        }
      } } }, t('run.cancel'));
      buttons.push(cancel);
    }
    if (!onPage) buttons.push(h('a', { class: 'quiet button', href: `/runs/${record.id}` }, t('run.open')));
    if (!record.request?.zero_data_retention) {
      buttons.push(h('button', { type: 'button', class: 'quiet', 'aria-haspopup': 'dialog', on: { click: () => shareDialog(path, key) } }, t('share.button')));
    }
    return buttons;
  };
}

function shareDialog(path, key) {
  const list = h('ul', { class: 'shares' });
  const fresh = h('div', { class: 'fresh' });
  const fault = h('p', { class: 'error', role: 'alert' });
  const lifetime = h('select', { id: 'share-lifetime' }, lifetimes.map(([name, seconds]) => h('option', { value: String(seconds) }, t(name))));
  const guard = async (action) => {
    fault.textContent = '';
    try {
      await action();
    } catch (error) {
      fault.textContent = error.title ?? error.message;
    }
  };
  const refresh = async () => {
    const { shares } = await call('GET', `${path}/shares`, { key });
    list.replaceChildren(...shares.map((s) => h('li', {}, h('span', {}, t('share.until', { date: date(s.expires_at) })),
      h('button', { type: 'button', class: 'quiet danger', on: { click: () => guard(async () => { await call('DELETE', `${path}/shares/${s.id}`, { key }); fresh.replaceChildren(); await refresh(); }) } }, t('share.revoke')))));
    if (shares.length === 0) list.append(h('li', { class: 'hint' }, t('share.none')));
  };
  const create = () => guard(async () => {
    const share = await call('POST', `${path}/shares`, { key, body: JSON.stringify({ expires_in_seconds: Number(lifetime.value) }) });
    const address = `${location.origin}/shared#${share.token}`;
    const field = h('input', { type: 'text', readonly: true, value: address, 'aria-label': t('share.address'), translate: 'no' });
    fresh.replaceChildren(h('p', {}, t('share.made')), h('div', { class: 'inline' }, field, copyButton(t('word.copy'), t('word.copied'), () => address)));
    field.select();
    await refresh();
  });
  const dialog = h('dialog', { class: 'card', 'aria-labelledby': 'share-title' },
    h('h2', { id: 'share-title' }, t('share.title')), h('p', { class: 'hint' }, t('share.text')),
    h('div', { class: 'inline' }, h('label', { for: 'share-lifetime' }, t('share.lifetime')), lifetime, h('button', { type: 'button', class: 'primary', on: { click: create } }, t('share.create'))),
    fault, fresh, h('h3', {}, t('share.list')), list,
    h('div', { class: 'dialog-end' }, h('button', { type: 'button', class: 'quiet', on: { click: () => dialog.close() } }, t('word.close'))));
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  guard(refresh);
}
