// Making and finding elements. Text only ever becomes text here, never HTML.

export const byId = (id) => document.getElementById(id);

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "readOnly", "tabIndex"]);

/** An element: `class` and attributes by name, properties such as `value`, listeners as `onclick`. */
export function make(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** One of the symbols of the page. */
export function icon(name) {
  const node = document.createElementNS(SVG, "svg");
  node.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  node.append(use);
  return node;
}

/** An element of an SVG picture. */
export function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A button with a symbol, whose meaning is told to those who do not see it. */
export function iconButton(name, label, onclick, given = {}) {
  return make("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...given },
    icon(name));
}

/** Tell those who use a screen reader. */
export function announce(text) {
  byId("status").textContent = text;
}

/** A message that goes away by itself, with something to do about it. */
export function toast(text, action, act) {
  const node = make("div", { class: "toast" }, text);
  const away = setTimeout(() => node.remove(), 8000);
  if (action)
    node.append(make("button", { type: "button", onclick: () => { clearTimeout(away); node.remove(); act(); } }, action));
  byId("toasts").replaceChildren(node);
  announce(text);
}

/** A random name for something new. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return "c" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
