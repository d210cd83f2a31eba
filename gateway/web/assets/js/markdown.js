// Renders Markdown that a machine wrote. The vendored lexer says what there is; the elements are built here, one kind of
// token at a time, so that markup in the text stays text. Nothing is loaded from elsewhere: pictures become links.

import { Lexer } from '../vendor/marked.js';
import { h } from './dom.js';
import { visible } from './visible.js';

const longest = 64 << 10; // longer texts are shown as they are
const deepest = 20; // levels of nesting

// markdown returns an element for the text.
export function markdown(text) {
  const box = h('div', { class: 'markdown', dir: 'auto' });
  if (text.length > longest) {
    box.append(h('pre', {}, visible(text)));
    return box;
  }
  box.append(...blocks(new Lexer({ gfm: true }).lex(text), 0));
  return box;
}

const plain = (token) => visible(token.raw ?? token.text ?? '');

// Headings in a result start below those of the page.
const heading = (depth) => `h${Math.min(depth + 2, 6)}`;

function blocks(tokens, depth) {
  if (depth > deepest) return tokens.flatMap(plain);
  const inside = (token) => (token.tokens ? inline(token.tokens, depth + 1) : visible(token.text));
  return tokens.flatMap((token) => {
    switch (token.type) {
      case 'space': case 'def': return [];
      case 'heading': return [h(heading(token.depth), {}, inside(token))];
      case 'paragraph': return [h('p', {}, inside(token))];
      case 'text': return inside(token);
      case 'code': return [h('pre', { dir: 'ltr', tabindex: '0' }, h('code', {}, visible(token.text)))];
      case 'blockquote': return [h('blockquote', {}, blocks(token.tokens, depth + 1))];
      case 'hr': return [h('hr')];
      case 'list': return [h(token.ordered ? 'ol' : 'ul', { start: token.ordered && token.start !== 1 ? token.start : null }, token.items.map((item) => h('li', {}, item.task && (item.checked ? '☑ ' : '☐ '), blocks(item.tokens, depth + 1))))];
      case 'table': return [table(token, depth)];
      default: return [h('p', {}, plain(token))];
    }
  });
}

function table(token, depth) {
  const row = (cells, tag) => h('tr', {}, cells.map((cell) => h(tag, {}, inline(cell.tokens, depth + 1))));
  return h('div', { class: 'table-box', tabindex: '0' }, h('table', {}, h('thead', {}, row(token.header, 'th')), h('tbody', {}, token.rows.map((cells) => row(cells, 'td')))));
}

function inline(tokens, depth) {
  if (depth > deepest) return tokens.flatMap(plain);
  const inside = (token) => inline(token.tokens ?? [], depth + 1);
  return tokens.flatMap((token) => {
    switch (token.type) {
      case 'text': case 'escape': return token.tokens ? inside(token) : visible(token.text);
      case 'strong': return [h('strong', {}, inside(token))];
      case 'em': return [h('em', {}, inside(token))];
      case 'del': return [h('del', {}, inside(token))];
      case 'codespan': return [h('code', {}, visible(token.text))];
      case 'br': return [h('br')];
      case 'link': case 'image': return [link(token, token.type === 'link' ? inside(token) : visible(token.text || token.href))];
      default: return plain(token);
    }
  });
}

// link makes a link of web and mail addresses; any other address is shown beside its text.
function link(token, content) {
  let address;
  try { address = new URL(token.href); } catch { /* relative, or none at all */ }
  if (!address || !['http:', 'https:', 'mailto:'].includes(address.protocol)) return h('span', {}, content, ' (', visible(token.href), ')');
  return h('a', { href: address.href, target: '_blank', rel: 'noopener noreferrer nofollow', title: address.href }, content);
}
