// Markdown to elements: marked makes HTML, DOMPurify makes it harmless, then code gets its colours and
// formulas are set. While text comes in, only the blocks that changed are made anew.

import DOMPurify from "../vendor/dompurify/purify.js";
import { Marked } from "../vendor/marked/marked.js";
import { copyBy } from "./copy.js";
import { make } from "./dom.js";
import { mathExtensions, setMath } from "./math.js";
import { previewButton, previewable } from "./preview.js";
import { t } from "./words.js";

const escape = (text) => text.replace(/[&<>"']/g, (c) => (
  { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

/** Tags without attributes that a text may bring; all others are shown as they are written. */
const PLAIN_TAG = /^<\/?(?:br|sub|sup|kbd|mark|u)\s*\/?>$/i;

const formula = ({ tex, display }) => `<span data-math="${escape(tex)}" data-display="${Boolean(display)}"></span>`;

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: mathExtensions(formula),
  renderer: {
    html: ({ text }) => (PLAIN_TAG.test(text.trim()) ? text : escape(text)),
    code: ({ text, lang }) => `<pre data-lang="${escape((lang ?? "").split(/\s/)[0])}"><code>${escape(text)}</code></pre>`,
    // A picture from elsewhere would tell elsewhere who reads this: it becomes a link.
    image({ href, text, tokens }) {
      const shown = escape(text || t("picture"));
      return /^data:image\/(png|jpeg|gif|webp);/.test(href)
        ? `<img src="${escape(href)}" alt="${shown}">` : `<a href="${escape(href)}">${shown}</a>`;
    },
  },
});

const SAFE = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "img",
    "input", "kbd", "li", "mark", "ol", "p", "pre", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead",
    "tr", "u", "ul"],
  ALLOWED_ATTR: ["align", "alt", "checked", "data-display", "data-lang", "data-math", "disabled", "href", "src",
    "start", "title", "type"],
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/(?:png|jpeg|gif|webp);)/i,
};

/** HTML of ours as elements. */
const clean = (html) => DOMPurify.sanitize(html, SAFE);

/** An element that shows Markdown. */
export class Markdown {
  constructor() {
    this.node = make("div", { class: "markdown" });
    this.blocks = [];
  }

  /** Show `text`; `coming` while there will be more of it. */
  set(text, coming = false) {
    const tokens = marked.lexer(text);
    const same = this.blocks.findIndex((block, place) =>
      block.raw !== tokens[place]?.raw || (block.coming && !coming));
    const kept = same < 0 ? Math.min(this.blocks.length, tokens.length) : same;
    for (const { nodes } of this.blocks.splice(kept)) nodes.forEach((node) => node.remove());
    for (const token of tokens.slice(kept)) {
      const last = token === tokens.at(-1);
      const nodes = block(token, coming && last);
      this.node.append(...nodes);
      this.blocks.push({ raw: token.raw, nodes, coming: coming && last });
    }
  }
}

function block(token, coming) {
  const fragment = clean(marked.parser([token]));
  for (const pre of fragment.querySelectorAll("pre")) dressCode(pre, coming);
  for (const node of fragment.querySelectorAll("[data-math]")) setMath(node);
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": t("Table") });
    table.replaceWith(box);
    box.append(table);
  }
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  return [...fragment.childNodes];
}

function dressCode(pre, coming) {
  const code = pre.querySelector("code"), language = pre.dataset.lang ?? "";
  const box = make("div", { class: "code" });
  const copy = make("button", { type: "button", onclick: () => copyBy(copy, code.textContent) }, t("Copy"));
  pre.replaceWith(box);
  pre.tabIndex = 0;
  const preview = !coming && previewable(language, code.textContent) && previewButton(box, () => code.textContent);
  box.append(make("div", { class: "row" }, make("span", { class: "faint" }, language), make("span", {}, preview, copy)), pre);
  if (language && !(coming && code.textContent.length > 4000)) colour(code, language);
}

let loading;

async function colour(code, language) {
  loading ??= import("../vendor/highlight/highlight.js");
  const { default: highlighter } = await loading;
  if (!highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value,
    { RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] }));
}
