// Nodes of the page, made once; only their texts change.

export function element(tag, className = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** A node of a drawing. */
export function drawing(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Write a text only if it is another one: what is not touched is not laid out again. */
export function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Write a text of which every second part is an address: those become links. */
export function setLinked(node, parts) {
  if (node.textContent === parts.join("")) return;
  node.replaceChildren(...parts.map((part, place) => (place % 2 ? link(part) : part)));
}

/** Write a text in parts, each with its CSS; only if it is another one. */
export function setParts(node, parts) {
  const key = JSON.stringify(parts);
  if (node.parts === key && node.textContent === parts.map(({ text }) => text).join("")) return;
  node.parts = key;
  node.replaceChildren(...parts.map(({ text, css }) => (css ? styled(text, css) : text)));
}

function styled(text, css) {
  const node = element("span");
  node.textContent = text;
  node.style.cssText = css;
  return node;
}

function link(address) {
  const node = element("a");
  node.href = node.textContent = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

export function section(className, label) {
  const node = element("section", className);
  node.setAttribute("aria-label", label);
  return node;
}

/** Make `parent` have one child for each item; children are used again. */
export function fill(parent, items, make, write) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  items.forEach((item, index) => write(parent.children[index] ?? parent.appendChild(make()), item));
  if (parent.hidden !== !items.length) parent.hidden = !items.length;
}

/** Put a text on the clipboard; false if the page may not. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyOfField(text);
  }
}

/** The older way, for pages that came over plain HTTP. */
function copyOfField(text) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const field = document.body.appendChild(/** @type {HTMLTextAreaElement} */ (element("textarea")));
  field.value = text;
  field.style.position = "fixed";
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus({ preventScroll: true });
  return done;
}
