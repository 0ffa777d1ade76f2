// An answer as its tokens, coloured by how sure the model was; under the pointer, or with the arrow
// keys, what else it thought of.

import { make } from "./dom.js";
import { t } from "./words.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (token) => token.replace(/\n/g, "↵").replace(/^ | $/g, "␣") || "∅";

export function tokensView(logprobs) {
  const box = make("div", { class: "tokens", role: "group", "aria-label": t("Tokens with probabilities; arrow keys move") });
  const card = make("div", { class: "card", role: "status" }, t("Point at a token."));
  const nodes = logprobs.map((entry) => tokenNode(entry, () => show(card, entry)));
  if (nodes.length) nodes[0].tabIndex = 0;
  box.addEventListener("keydown", (event) => move(event, nodes));
  box.append(make("div", { class: "said" }, ...nodes), card);
  return box;
}

function tokenNode(entry, shown) {
  const sure = Math.exp(entry.logprob);
  const level = sure > 0.9 ? 4 : sure > 0.6 ? 3 : sure > 0.3 ? 2 : sure > 0.1 ? 1 : 0;
  return make("span", { class: `token sure-${level}`, tabIndex: -1, onpointerenter: shown, onfocus: shown,
    title: `${visible(entry.token)} ${percent(entry.logprob)}` }, entry.token);
}

function show(card, entry) {
  const others = entry.others.map(([token, logprob]) =>
    make("li", { class: token === entry.token ? "own" : "" }, make("code", {}, visible(token)), ` ${percent(logprob)}`));
  card.replaceChildren(make("strong", {}, make("code", {}, visible(entry.token)), ` ${percent(entry.logprob)}`),
    make("ol", {}, ...others));
}

function move(event, nodes) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const here = nodes.indexOf(document.activeElement);
  nodes[Math.min(nodes.length - 1, Math.max(0, here + step))]?.focus();
  event.preventDefault();
}
