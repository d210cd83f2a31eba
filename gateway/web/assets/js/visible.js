// Shows what comes out of a machine as text: characters that steer a terminal, hide, or turn the direction of writing are
// made visible, so that what a person reads is what is there.

import { h } from './dom.js';
import { t, bytes } from './i18n.js';

// Control and format characters except line feed, tab, and the two joiners that scripts and emoji need.
const special = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;
const marks = 2000; // elements for single characters; beyond that they become plain text

// nameOf is how a special character is shown.
function nameOf(c) {
  const code = c.codePointAt(0);
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, '0')}`;
  return `U+${code.toString(16).toUpperCase().padStart(4, '0')}`;
}

// visible returns a list of strings and elements for a text.
export function visible(text) {
  text = text.replaceAll('\r\n', '\n');
  const found = [...text.matchAll(special)];
  if (found.length === 0) return [text];
  if (found.length > marks) return [text.replace(special, nameOf)];
  const parts = [];
  let end = 0;
  for (const m of found) {
    if (m.index > end) parts.push(text.slice(end, m.index));
    parts.push(h('span', { class: 'ctl' }, nameOf(m[0])));
    end = m.index + m[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}

// line is a text on one line of bounded length.
export function line(text, limit = 240) {
  const flat = text.slice(0, 4 * limit).replace(/\s+/g, ' ').trim();
  const cut = [...flat].slice(0, limit).join('');
  return visible(cut.length < flat.length || text.length > 4 * limit ? `${cut}…` : cut);
}

const firstBytes = 16384; // shown before someone asks for more
const firstLines = 400;

// output is a block of text from a machine. Content is text, or base64 when encoding says so; bytes is how many there were.
export function output({ content = '', encoding, bytes: total = 0, truncated = false }, label) {
  const text = encoding === 'base64' ? decode(content) : content;
  const start = head(text);
  const pre = h('pre', { class: 'output', dir: 'ltr', tabindex: '0', role: 'group', 'aria-label': label, translate: 'no' }, visible(start));
  const box = h('div', { class: 'output-box' }, pre);
  if (start.length < text.length) {
    const more = h('button', { type: 'button', class: 'quiet', on: { click: () => { pre.replaceChildren(...visible(text)); more.remove(); pre.focus(); } } }, t('output.all', { size: bytes(new Blob([text]).size) }));
    box.append(more);
  }
  if (truncated) box.append(h('p', { class: 'hint' }, t('output.truncated', { size: bytes(total) })));
  if (encoding === 'base64') box.append(h('p', { class: 'hint' }, t('output.binary')));
  return box;
}

function head(text) {
  let end = Math.min(text.length, firstBytes);
  let at = -1;
  for (let i = 0; i < firstLines; i++) {
    at = text.indexOf('\n', at + 1);
    if (at < 0 || at >= end) return text.slice(0, end);
  }
  return text.slice(0, Math.min(end, at));
}

function decode(base64) {
  return new TextDecoder().decode(Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)));
}
