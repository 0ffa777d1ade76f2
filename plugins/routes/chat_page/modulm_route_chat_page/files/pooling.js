// The page of models that give vectors, scores or classes: texts in, a picture of them out.

import { about, ask, key, models } from "./js/api.js";
import { announce, byId, make, toast } from "./js/dom.js";
import { bars, matrix, scatter } from "./js/pictures.js";
import { shared } from "./js/store.js";
import { plane, similarities } from "./js/vectors.js";
import { t, translatePage } from "./js/words.js";

const EXAMPLES = [
  "How do I bake a loaf of bread?", "Bread rises because yeast gives off carbon dioxide.",
  "A recipe for sourdough needs flour, water, salt and patience.", "The Alps stretch over eight countries.",
  "Mountains are formed when plates of the earth collide.",
];

const linesOf = (field) => field.value.split("\n").map((line) => line.trim()).filter(Boolean);

let model = "";

/** A part of the page: fields, a button, and what becomes of them. */
function part(title, about, fields, label, act) {
  const result = make("div", { class: "result" });
  const button = make("button", { class: "main" }, label);
  const form = make("form", { class: "part", "aria-label": title, onsubmit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      result.replaceChildren(...(await act()));
      announce(t("{0}: done", title));
    } catch (error) {
      result.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
      if (error.status === 401) askKey();
    } finally {
      button.disabled = false;
    }
  } }, make("h3", {}, title), make("p", { class: "faint" }, about), ...fields, button, result);
  return form;
}

const field = (label, value, rows) => {
  const text = make("textarea", { value, rows, "aria-label": label });
  return { text, node: make("label", {}, label, text) };
};

async function answer(path, body) {
  return (await ask(path, { model, ...body })).json();
}

function compare() {
  const texts = field(t("Texts, one per line"), EXAMPLES.join("\n"), 6);
  return part(t("Compare texts"), t("Each text becomes a vector; the closer two of them point, the more alike the texts are."),
    [texts.node], t("Compare"), async () => {
      const lines = linesOf(texts.text);
      const { data, usage } = await answer("v1/embeddings", { input: lines, encoding_format: "float" });
      const vectors = data.map(({ embedding }) => embedding);
      return [matrix(lines, similarities(vectors)), lines.length > 2 && scatter(lines, plane(vectors)),
        make("p", { class: "faint" }, t("{0} vectors of {1} numbers · {2} tokens", vectors.length, vectors[0].length, usage.prompt_tokens))].filter(Boolean);
    });
}

function rank() {
  const query = make("input", { value: EXAMPLES[0], "aria-label": t("Question") });
  const texts = field(t("Documents, one per line"), EXAMPLES.slice(1).join("\n"), 6);
  return part(t("Rank documents"), t("How well each document fits the question, the best first."),
    [make("label", {}, t("Question"), query), texts.node], t("Rank"), async () => {
      const { results } = await answer("rerank", { query: query.value, documents: linesOf(texts.text) });
      return [bars(results.map(({ document, relevance_score: score }) => [document.text, score]))];
    });
}

function classify() {
  const texts = field(t("Texts, one per line"), EXAMPLES.slice(1, 3).join("\n"), 4);
  return part(t("Classify texts"), t("The probability of each class."), [texts.node], t("Classify"), async () => {
    const lines = linesOf(texts.text), { data } = await answer("classify", { input: lines });
    return data.flatMap(({ probs, label }, place) => {
      const shown = probs.map((value, index) => [t("class {0}", index), value]);
      const best = probs.indexOf(Math.max(...probs));
      if (label) shown[best][0] = label;
      return [make("h4", {}, lines[place]), bars(shown.sort((a, b) => b[1] - a[1]).slice(0, 8))];
    });
  });
}

function perToken() {
  return make("section", { class: "part" }, make("h3", {}, t("Vectors of tokens")),
    make("p", {}, `${t("This model gives a vector for every token. Send texts to")} `, make("code", {}, "/pooling"), "."));
}

/** What is offered, by the first of these tasks that the model has. */
const PARTS = [["embed", compare], ["classify", classify]];

function askKey() {
  document.querySelector(".key").hidden = false;
  byId("key").focus();
}

async function start() {
  try {
    const [listed, facts] = await Promise.all([models(), about()]);
    model = listed[0].id;
    byId("model").textContent = model;
    document.title = `${model} · modulm`;
    const { tasks } = facts;
    const parts = PARTS.filter(([task]) => tasks.includes(task)).map(([, make_]) => make_());
    if (["score", "embed", "token_embed"].some((task) => tasks.includes(task))) parts.push(rank());
    byId("main").replaceChildren(...(parts.length ? parts : [perToken()]));
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    if (error.status === 401) askKey();
    toast(error.message);
  }
}

translatePage();
byId("key").value = key.get();
byId("key").addEventListener("change", () => { key.set(byId("key").value); start(); });
byId("theme").value = shared.get("theme", "auto");
byId("theme").addEventListener("change", () => {
  shared.set("theme", byId("theme").value);
  document.documentElement.dataset.theme = byId("theme").value;
});
start();
