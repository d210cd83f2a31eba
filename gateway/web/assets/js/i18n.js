// Texts in the language of the page, and numbers, money, times and plurals as that language writes them.

const html = document.documentElement;
export const language = html.lang;

const load = async (address) => {
  const answer = await fetch(address, { credentials: 'same-origin' });
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
  return answer.json();
};
const texts = await load(html.dataset.texts);

const plurals = new Intl.PluralRules(language);
const integers = new Intl.NumberFormat(language);

function pick(key, values) {
  const text = texts[key];
  if (text === undefined) return null;
  if (typeof text === 'string') return text;
  return text[plurals.select(values?.n ?? 0)] ?? text.other;
}

// has tells whether there is a text of that key.
export const has = (key) => texts[key] !== undefined;

const write = (name, value) => (name === 'n' && typeof value === 'number' ? integers.format(value) : String(value));

// t returns the text of a key with {names} replaced. {n} is a number and decides on the plural form.
export function t(key, values) {
  const text = pick(key, values);
  if (text === null) return key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (values && name in values ? write(name, values[name]) : whole));
}

// tn is t for values that are nodes; it returns a list of strings and nodes.
export function tn(key, values) {
  return (pick(key, values) ?? key).split(/\{(\w+)\}/).map((part, i) => {
    if (i % 2 === 0) return part;
    const value = values[part];
    return value instanceof Node ? value : write(part, value);
  });
}

const dollars = new Intl.NumberFormat(language, { style: 'currency', currency: 'USD', minimumFractionDigits: 2, maximumFractionDigits: 6 });
const seconds = new Intl.NumberFormat(language, { minimumFractionDigits: 3, maximumFractionDigits: 3, useGrouping: false });
const unit = (name, digits) => new Intl.NumberFormat(language, { style: 'unit', unit: name, unitDisplay: 'narrow', maximumFractionDigits: digits });
const units = { ms: unit('millisecond', 0), ms1: unit('millisecond', 1), s: unit('second', 2), min: unit('minute', 1), B: unit('byte', 0), kB: unit('kilobyte', 1), MB: unit('megabyte', 1), GB: unit('gigabyte', 1) };
const dates = new Intl.DateTimeFormat(language, { dateStyle: 'medium', timeStyle: 'short' });
const times = new Intl.DateTimeFormat(language, { timeStyle: 'short' });
const days = new Intl.DateTimeFormat(language, { dateStyle: 'medium' });
const shares = new Intl.NumberFormat(language, { style: 'percent', maximumFractionDigits: 1 });

// money writes micro-dollars.
export const money = (micros) => dollars.format(micros / 1e6);
export const number = (n) => integers.format(n);
export const percent = (share) => shares.format(share);
// clock writes milliseconds as seconds with three decimals, for columns.
export const clock = (ms) => seconds.format(ms / 1000);
export const date = (iso) => dates.format(new Date(iso));

// when writes the time of a moment today, and the day of any other.
export function when(iso) {
  const at = new Date(iso);
  return (at.toDateString() === new Date().toDateString() ? times : days).format(at);
}

// duration writes milliseconds in the unit that suits them.
export function duration(ms) {
  if (ms > 0 && ms < 0.1) return `<${units.ms1.format(0.1)}`;
  if (ms < 10) return units.ms1.format(ms);
  if (ms < 1000) return units.ms.format(ms);
  return ms < 120000 ? units.s.format(ms / 1000) : units.min.format(ms / 60000);
}

export function bytes(n) {
  if (n < 1000) return units.B.format(n);
  if (n < 1e6) return units.kB.format(n / 1e3);
  return n < 1e9 ? units.MB.format(n / 1e6) : units.GB.format(n / 1e9);
}

// The switch of languages. The server renders the page anew, so the choice is a cookie.
const choice = document.getElementById('language');
choice?.addEventListener('change', () => {
  document.cookie = `language=${choice.value}; Path=/; Max-Age=31536000; SameSite=Lax`;
  window.dispatchEvent(new Event('leaving'));
  location.reload();
});
