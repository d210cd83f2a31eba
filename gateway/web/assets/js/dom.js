// Builds elements. Text goes in as text nodes only; nothing here parses markup.

// h makes an element. Properties: class, data (dataset), on (listeners by event), hidden and other booleans as booleans,
// everything else as attributes; null and false leave an attribute out. Children are nodes, strings, or lists of them.
export function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'class') node.className = value;
    else if (name === 'data') Object.assign(node.dataset, value);
    else if (name === 'on') for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? '' : value);
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(node, child);
    else if (child !== null && child !== undefined && child !== false) node.append(child);
  }
}

export const $ = (id) => document.getElementById(id);

// copyButton copies what text() returns and says so for a moment.
export function copyButton(label, done, text) {
  const button = h('button', { type: 'button', class: 'quiet copy', 'aria-label': label, title: label }, h('span', { class: 'copy-icon', 'aria-hidden': 'true' }));
  const said = h('span', { class: 'sr', role: 'status' });
  button.addEventListener('click', async () => {
    await navigator.clipboard.writeText(text());
    button.classList.add('done');
    said.textContent = done;
    setTimeout(() => { button.classList.remove('done'); said.textContent = ''; }, 1500);
  });
  return [button, said];
}
