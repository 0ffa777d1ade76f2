// LaTeX in Markdown: `$x$`, `\(x\)`, `$$x$$`, `\[x\]`. A dollar sign before a space, or one that a
// digit follows, is a dollar sign.

const INLINE = [
  [/^\$\$([^$]+?)\$\$/, true],
  [/^\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<![\s\\])\$(?![\d$])/, false],
  [/^\\\(([\s\S]+?)\\\)/, false],
  [/^\\\[([\s\S]+?)\\\]/, true],
];
const BLOCK = [/^ {0,3}\$\$([\s\S]+?)\$\$[ \t]*(?:\n|$)/, /^ {0,3}\\\[([\s\S]+?)\\\][ \t]*(?:\n|$)/];

function found(source, rules, type) {
  for (const [rule, display] of rules) {
    const match = rule.exec(source);
    if (match?.[1].trim()) return { type, raw: match[0], tex: match[1].trim(), display };
  }
}

/** Extensions for marked; `place(token)` gives the HTML in whose place the formula will be set. */
export function mathExtensions(place) {
  return [
    {
      name: "mathBlock", level: "block",
      start: (source) => source.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
      tokenizer: (source) => found(source, BLOCK.map((rule) => [rule, true]), "mathBlock"),
      renderer: (token) => `<p>${place(token)}</p>`,
    },
    {
      name: "math", level: "inline",
      start: (source) => source.match(/\$|\\\(|\\\[/)?.index,
      tokenizer: (source) => found(source, INLINE, "math"),
      renderer: place,
    },
  ];
}

let loading;

/** KaTeX, loaded when the first formula comes. It sets elements, not HTML. */
function katex() {
  loading ??= import("../vendor/katex/katex.js").then(() => globalThis.katex);
  return loading;
}

/** Set the formula of an element that `place` made. */
export async function setMath(node) {
  const { math, display } = node.dataset;
  const renderer = await katex();
  try {
    renderer.render(math, node, { displayMode: display === "true", throwOnError: true, trust: false,
      strict: "ignore", maxSize: 20, maxExpand: 500 });
  } catch {
    const mark = display === "true" ? "$$" : "$";
    node.textContent = mark + math + mark;
    node.classList.add("wrong");
  }
}
