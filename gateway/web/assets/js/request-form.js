// The form of a request: read, filled, remembered, and marked where the server finds fault.

import { detail } from './details.js';
import { $, h } from './dom.js';
import { t } from './i18n.js';

const draft = 'ephemeral-draft';
const defaults = { timeout_seconds: 120, max_cost_micros: 40000 };

export class RequestForm {
  constructor(onChange) {
    this.form = $('request');
    this.files = $('files');
    this.onChange = onChange;
    this.form.addEventListener('input', (event) => { this.#mend(event.target); this.#changed(); });
    for (const kind of this.form.elements.kind) kind.addEventListener('change', () => this.#changed());
    $('add-file').addEventListener('click', () => { this.#addFile({ path: '', content: '' }).querySelector('input').focus(); this.#changed(); });
  }

  get kind() { return this.form.elements.kind.value; }

  // request is what the form sends. What a person left out is left out.
  request() {
    const r = {};
    const prompt = this.kind === 'prompt';
    if (prompt) r.prompt = $('prompt').value;
    else r.command = $('command').value;
    if (prompt) {
      if ($('model').value.trim()) r.model = $('model').value.trim();
      r.web = $('web').checked;
      r.shell = $('shell').checked;
      const connections = $('connections').value.split(/[\s,]+/).filter(Boolean);
      if (connections.length > 0) r.connections = connections;
      if ($('expose').checked) r.expose_broker = true;
    }
    const files = [...this.files.children].map((row) => row.file());
    if (files.length > 0) r.files = files;
    r.timeout_seconds = Number($('timeout').value);
    r.max_cost_micros = Math.round(Number($('budget').value) * 1e6);
    if ($('zdr').checked) r.zero_data_retention = true;
    return r;
  }

  // fill writes a request into the form.
  fill(r) {
    r = { ...defaults, ...r };
    for (const kind of this.form.elements.kind) kind.checked = kind.value === (r.command === undefined ? 'prompt' : 'command');
    $('prompt').value = r.prompt ?? '';
    $('command').value = r.command ?? '';
    $('model').value = r.model ?? '';
    $('shell').checked = r.shell ?? true;
    $('web').checked = r.web ?? false;
    $('connections').value = (r.connections ?? []).join(', ');
    $('expose').checked = r.expose_broker ?? false;
    $('zdr').checked = r.zero_data_retention ?? false;
    $('timeout').value = String(r.timeout_seconds);
    $('budget').value = String(r.max_cost_micros / 1e6);
    this.files.replaceChildren();
    for (const file of r.files ?? []) this.#addFile(file);
    this.clear();
    this.#changed();
  }

  // restore fills in what this tab had before a reload, and tells whether there was anything.
  restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(draft));
      if (kept) this.fill(kept);
      return Boolean(kept);
    } catch {
      return false;
    }
  }

  #changed() {
    const prompt = this.kind === 'prompt';
    this.form.querySelector('[data-field="prompt"]').hidden = !prompt;
    this.form.querySelector('[data-field="command"]').hidden = prompt;
    for (const row of this.form.querySelectorAll('[data-only="prompt"]')) row.hidden = !prompt;
    $('shell').disabled = !prompt;
    if (!prompt) $('shell').checked = true;
    const request = this.request();
    try {
      sessionStorage.setItem(draft, JSON.stringify(request));
    } catch { /* larger than the browser keeps: the form is not remembered */ }
    this.onChange(request);
  }

  #addFile(file) {
    const path = h('input', { type: 'text', value: file.path, placeholder: 'data.csv', 'aria-label': t('play.files.path'), autocapitalize: 'off', spellcheck: 'false', translate: 'no' });
    const content = h('textarea', { rows: '3', class: 'mono', 'aria-label': t('play.files.content'), spellcheck: 'false', translate: 'no' });
    content.value = file.content ?? ''; // left out where it is empty
    content.hidden = Boolean(file.upload);
    const remove = h('button', { type: 'button', class: 'quiet danger', on: { click: () => { row.remove(); $('add-file').focus(); this.#changed(); } } }, t('play.files.remove'));
    const row = h('div', { class: 'file' }, h('div', { class: 'inline' }, path, remove), content);
    row.file = () => (file.upload
      ? { path: path.value, upload: file.upload, ...(file.mode && { mode: file.mode }) }
      : { path: path.value, content: content.value, ...(file.encoding && { encoding: file.encoding }), ...(file.mode && { mode: file.mode }) });
    row.inputs = { path, content };
    this.files.append(row);
    return row;
  }

  // clear takes all marks of faults away.
  clear() {
    for (const mark of this.form.querySelectorAll('.error')) mark.remove();
    for (const input of this.form.querySelectorAll('[aria-invalid]')) {
      input.removeAttribute('aria-invalid');
      input.removeAttribute('aria-describedby');
    }
    $('request-error').hidden = true;
  }

  // mend takes the mark of a fault away from an input that a person changes.
  #mend(input) {
    if (!input.hasAttribute('aria-invalid')) return;
    $(input.getAttribute('aria-describedby'))?.remove();
    input.removeAttribute('aria-invalid');
    input.removeAttribute('aria-describedby');
  }

  // fault marks the fields that a problem names, and says the rest above the form.
  fault(problem) {
    this.clear();
    const rest = [];
    let first = null;
    problem.errors.forEach((e, i) => {
      const place = this.#place(e.field);
      if (!place) return rest.push([`${e.field}: `, detail(e)]);
      const id = `fault-${i}`;
      place.input.setAttribute('aria-invalid', 'true');
      place.input.setAttribute('aria-describedby', id);
      place.box.append(h('p', { class: 'error', id }, detail(e)));
      first ??= place.input;
    });
    const box = $('request-error');
    box.replaceChildren(h('strong', {}, problem.title), ...rest.map((line) => h('p', {}, line)));
    if (problem.errors.length === 0 && problem.message) box.append(h('p', { class: 'hint', lang: 'en' }, problem.message));
    box.hidden = false;
    (first ?? box).focus();
  }

  // place finds where a field such as files[2].path stands.
  #place(field) {
    const [, name, index, part] = /^(\w+)(?:\[(\d+)\])?(?:\.(\w+))?/.exec(field) ?? [];
    const box = name && this.form.querySelector(`[data-field="${CSS.escape(name)}"]`);
    if (!box || box.closest('[hidden]')) return null;
    const row = name === 'files' && this.files.children[Number(index)];
    if (row) return { box: row, input: row.inputs[part] ?? row.inputs.path };
    return { box, input: box.querySelector('input, textarea, button') };
  }
}
