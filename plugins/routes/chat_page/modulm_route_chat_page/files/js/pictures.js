// Pictures of numbers: a table of similarities, places in a plane, bars.

import { draw, make } from "./dom.js";
import { t } from "./words.js";

const short = (text, most = 32) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** A table whose cells are the deeper the more alike two texts are. */
export function matrix(texts, values) {
  const flat = values.flatMap((row, i) => row.filter((_, j) => i !== j));
  const least = Math.min(...flat, 1), most = Math.max(...flat, least + 1e-9);
  const cell = (value, i, j) => {
    const node = make("td", { title: `${texts[i]}\n${texts[j]}\n${value.toFixed(4)}` }, value.toFixed(2));
    const depth = i === j ? 1 : (value - least) / (most - least);
    node.style.setProperty("--depth", `${Math.round(depth * 100)}%`);
    if (depth > 0.75) node.className = "deep";
    return node;
  };
  return make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": t("Similarities") },
    make("table", { class: "matrix" }, make("caption", {}, t("Similarity of each pair (cosine)")),
      make("thead", {}, make("tr", {}, make("td"), ...texts.map((text, place) => make("th", { scope: "col", title: text }, String(place + 1))))),
      make("tbody", {}, ...values.map((row, i) =>
        make("tr", {}, make("th", { scope: "row", title: texts[i] }, `${i + 1} ${short(texts[i])}`), ...row.map((value, j) => cell(value, i, j)))))));
}

const WIDTH = 560, HEIGHT = 300, EDGE = 24;

/** Texts as points: what is alike lies close together. */
export function scatter(texts, places) {
  const sides = [0, 1].map((side) => {
    const all = places.map((place) => place[side]);
    return [Math.min(...all), Math.max(...all)];
  });
  const at = (place, side, room) => {
    const [least, most] = sides[side];
    return EDGE + (most > least ? (place[side] - least) / (most - least) : 0.5) * (room - 2 * EDGE);
  };
  const points = texts.map((text, index) => {
    const x = at(places[index], 0, WIDTH), y = at(places[index], 1, HEIGHT), right = x > WIDTH * 0.55;
    const label = draw("text", { x: x + (right ? -10 : 10), y: y + 4, "text-anchor": right ? "end" : "start" });
    label.textContent = `${index + 1} ${short(text, 34)}`;
    return draw("g", {}, draw("circle", { cx: x, cy: y, r: 6 }), label);
  });
  return make("figure", {}, draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "scatter", role: "img",
    "aria-label": t("Map of the texts: similar texts are close together") }, ...points),
    make("figcaption", { class: "faint" }, t("Similar texts are close together (two principal components).")));
}

/** [text, value] with a bar each. */
export function bars(rows) {
  const values = rows.map(([, value]) => value);
  const least = Math.min(0, ...values), most = Math.max(...values, least + 1e-9);
  return make("ol", { class: "bars" }, ...rows.map(([text, value]) => {
    const bar = make("span", { class: "bar" });
    bar.style.width = `${(100 * (value - least)) / (most - least)}%`;
    return make("li", {}, make("span", {}, text), make("span", { class: "track" }, bar), make("b", {}, value.toFixed(3)));
  }));
}
