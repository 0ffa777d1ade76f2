// The page begins here.

import { App } from "./js/app.js";
import { byId, make } from "./js/dom.js";
import { t, translatePage } from "./js/words.js";

translatePage();
const app = new App();

const SHORTCUTS = [
  ["Enter", "send"], ["Shift+Enter", "new line"], ["Escape", "stop the answer, close what is open"],
  ["↑ in an empty message", "edit the last question"], ["Enter when editing a question", "send it"], ["Ctrl+Enter", "save an edited answer"],
  ["Ctrl+Shift+O", "new chat"], ["Ctrl+Shift+L", "list of conversations"], ["Ctrl+Shift+,", "settings"],
  ["/", "to the message"], ["?", "this list"],
];

function help() {
  const dialog = byId("help");
  dialog.replaceChildren(make("h2", { id: "help-title" }, t("Keyboard")),
    make("dl", {}, ...SHORTCUTS.flatMap(([keys, what]) => [make("dt", {}, make("kbd", {}, t(keys))), make("dd", {}, t(what))])),
    make("form", { method: "dialog", onsubmit: (event) => { event.preventDefault(); dialog.close(); } }, make("button", { class: "main" }, t("Close"))));
  dialog.showModal();
}

const narrow = matchMedia("(max-width: 56rem)");

function toggleSidebar(open = document.body.classList.contains(narrow.matches ? "with-sidebar" : "without-sidebar") !== narrow.matches) {
  if (narrow.matches) document.body.classList.toggle("with-sidebar", open);
  else document.body.classList.toggle("without-sidebar", !open);
  byId("toggle-sidebar").setAttribute("aria-expanded", String(open));
  if (open && narrow.matches) byId("fresh").focus();
}

function writing(target) {
  return target.closest?.("input, textarea, select, [contenteditable]");
}

addEventListener("keydown", (event) => {
  const control = (event.ctrlKey || event.metaKey) && event.shiftKey;
  if (control && event.code === "KeyO") { event.preventDefault(); app.fresh(); }
  else if (control && event.code === "KeyL") { event.preventDefault(); toggleSidebar(); }
  else if (control && event.code === "Comma") { event.preventDefault(); app.settings.toggle(); }
  else if (event.key === "Escape" && document.body.classList.contains("with-sidebar")) toggleSidebar(false);
  else if (event.key === "Escape" && !writing(event.target)) app.stop();
  else if (writing(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
  else if (event.key === "/") { event.preventDefault(); byId("text").focus(); }
  else if (event.key === "?") help();
});

byId("fresh").addEventListener("click", () => app.fresh());
byId("toggle-sidebar").addEventListener("click", () => toggleSidebar());
byId("close-sidebar").addEventListener("click", () => { toggleSidebar(false); byId("toggle-sidebar").focus(); });
byId("main").addEventListener("click", () => toggleSidebarAway());
byId("keys").addEventListener("click", help);

function toggleSidebarAway() {
  if (narrow.matches && document.body.classList.contains("with-sidebar")) toggleSidebar(false);
}

await app.start();
document.documentElement.dataset.ready = "yes";
