// What the server finds wrong with a field, in the language of the page. The API says it in English; what a form can get to see
// is known here, and everything else is shown as it comes.

import { h } from './dom.js';
import { bytes, money, number, t } from './i18n.js';

const size = (n) => bytes(Number(n));
const count = (n) => number(Number(n));
const text = (s) => s;

// The server's words, the text for them, and how the parts in brackets are written.
const known = [
  [/^must be between (\d+) and (\d+)$/, 'detail.between', count],
  [/^is empty$|^is required, unless command is given$/, 'detail.empty'],
  [/^must be (?:an integer|a number)/, 'detail.number'],
  [/^ha(?:s|ve) (?:a part of )?(\d+) bytes(?: together)?, at most (\d+) are allowed$/, 'detail.large', size],
  [/^contains a (?:NUL|control) character$/, 'detail.control'],
  [/^is not a model of this server: (.*)$/, 'detail.model', text],
  [/^is required, since this server has no default model$/, 'detail.default'],
  [/^is not a connection of your organisation: (.*)$/, 'detail.connection', text],
  [/^is there twice/, 'detail.twice'],
  [/^must be relative$/, 'detail.relative'],
  [/^must not contain "\." or "\.\." as a part$|^has an empty part$|^contains a backslash$/, 'detail.path'],
  [/^has (\d+) parts, at most (\d+) are allowed$/, 'detail.deep', count],
  [/^is a directory of another file.s path$|^has another file as a directory$/, 'detail.clash'],
  [/^is not valid base64/, 'detail.base64'],
  [/^must have 1 to (\d+) bytes without control characters$/, 'detail.name', count],
  [/^is more than the account has available$/, 'detail.funds'],
  [/^cannot pay for the first slice of compute$/, 'detail.slice'],
];

// detail is a node that says what is wrong with a field.
export function detail({ field, detail: said }) {
  for (const [words, key, write] of known) {
    const found = words.exec(said);
    if (!found) continue;
    const as = field.endsWith('_micros') && write === count ? (n) => money(Number(n)) : write;
    const [a, b] = found.slice(1).map((part) => as(part));
    return h('span', {}, t(key, { a, b }));
  }
  return h('span', { lang: 'en' }, said);
}
