// HTML and SVG that an answer contains, shown in a frame that can reach neither this page nor a network.

import { make } from "./dom.js";
import { t } from "./words.js";

/** Whether a block of code can be shown as a page. */
export const previewable = (language, code) =>
  /^(html|svg)$/i.test(language) || (/^xml$/i.test(language) && /<svg[\s>]/i.test(code));

/** A button that opens and closes the preview of `code` below `box`. */
export function previewButton(box, code) {
  const button = make("button", { type: "button", "aria-pressed": "false", onclick: () => {
    const open = box.querySelector("iframe");
    if (open) open.remove();
    else box.append(frame(code()));
    button.setAttribute("aria-pressed", String(!open));
  } }, t("Preview"));
  return button;
}

function frame(text) {
  const node = make("iframe", { class: "preview", title: t("Preview"), sandbox: "allow-scripts", referrerpolicy: "no-referrer" });
  const ready = ({ source, data }) => {
    if (source !== node.contentWindow || data !== "ready") return;
    removeEventListener("message", ready);
    // The frame's origin is opaque, so it cannot be named; only this window is written to.
    source.postMessage(text, "*");
  };
  addEventListener("message", ready);
  node.src = new URL("../preview.html", import.meta.url);
  return node;
}
