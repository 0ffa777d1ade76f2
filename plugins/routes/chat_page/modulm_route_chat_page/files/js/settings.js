// The panel of settings. They belong to the conversation on the screen; those of an empty one are what
// new ones begin with.

import { key } from "./api.js";
import { byId, icon, make } from "./dom.js";
import { GROUPS, Invalid, valueOf } from "./fields.js";
import { PRESETS } from "./presets.js";
import { shared } from "./store.js";
import { LANGUAGES, t } from "./words.js";

export class Settings {
  /** changed(settings): what was typed has changed; asked(): a key was given. */
  constructor({ changed, keyGiven, asDefault }) {
    this.changed = changed;
    this.inputs = new Map();
    this.panel = byId("settings");
    this.panel.append(
      make("div", { class: "row head" }, make("h2", {}, t("Settings")),
        make("button", { type: "button", class: "icon", "aria-label": t("Close the settings"), onclick: () => this.toggle(false) }, icon("close"))),
      make("p", { class: "faint" }, t("For this conversation. Empty fields use the model's defaults.")),
      this.system(), ...GROUPS.map(([title, fields], place) => this.group(title, fields, place < 1)),
      this.page(keyGiven),
      make("div", { class: "row" },
        make("button", { type: "button", id: "as-default", onclick: asDefault }, t("Use for new chats")),
        make("button", { type: "button", id: "reset", onclick: () => this.reset() }, t("Reset"))));
    this.offer();
    byId("toggle-settings").addEventListener("click", () => this.toggle());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggle(false);
      byId("toggle-settings").focus();
    });
  }

  toggle(open = this.panel.hidden) {
    this.panel.hidden = !open;
    byId("toggle-settings").setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("with-settings", open);
  }

  /** Show the settings of a conversation. */
  show(values) {
    this.values = values;
    for (const [name, input] of this.inputs) {
      input.value = values[name] ?? "";
      this.check(name);
    }
  }

  /** Open the panel at a field that cannot be sent. */
  point(name) {
    this.toggle(true);
    const input = this.inputs.get(name);
    if (!input) return;
    const fold = input.closest("details");
    if (fold) fold.open = true;
    input.focus();
  }

  /** Show the settings of sound if the server speaks; speech: `about.speech`. */
  offer(speech) {
    for (const [name, shown] of [["spoken", speech?.answers], ["voice", speech]]) {
      const field = this.inputs.get(name).closest("label");
      field.hidden = !shown;
      if (shown && name === "voice") this.inputs.get(name).placeholder = speech.voices.slice(0, 3).join(", ");
    }
    this.inputs.get("voice").closest("details").hidden = !speech;
  }

  reset() {
    for (const name of Object.keys(this.values)) delete this.values[name];
    this.show(this.values);
    this.changed(this.values);
  }

  group(title, fields, open) {
    return make("details", { open }, make("summary", {}, t(title)), make("div", { class: "fields" }, ...fields.map((field) => this.field(field))));
  }

  field(field) {
    const input = this.input(field);
    const error = make("span", { class: "error", role: "alert" });
    this.inputs.set(field.name, Object.assign(input, { field, problem: error }));
    input.addEventListener("input", () => this.typed(field.name));
    const wide = field.wide || ["lines", "json"].includes(field.kind);
    return make("label", { class: wide ? "wide" : "" }, t(field.label), input, error);
  }

  input(field) {
    if (field.options) return make("select", {}, ...field.options.map(([value, label]) => new Option(t(label), value)));
    const hint = field.hint ?? (["number", "integer"].includes(field.kind) ? "default" : "");
    if (field.code || ["lines", "json"].includes(field.kind))
      return make("textarea", { rows: field.code ? 3 : 2, spellcheck: "false", class: field.code ? "code" : "", placeholder: t(hint) || undefined });
    return make("input", { inputmode: field.kind === "number" ? "decimal" : undefined, placeholder: t(hint) || undefined, autocomplete: "off" });
  }

  typed(name) {
    const { value } = this.inputs.get(name);
    if (value === "") delete this.values[name];
    else this.values[name] = value;
    this.check(name);
    this.changed(this.values);
  }

  check(name) {
    const input = this.inputs.get(name);
    let problem = "";
    try {
      if (input.field) valueOf(input.field, input.value);
    } catch (error) {
      if (!(error instanceof Invalid)) throw error;
      problem = error.message.slice(t(input.field.label).length + 2);
    }
    if (input.problem) input.problem.textContent = problem;
    input.setAttribute("aria-invalid", String(Boolean(problem)));
  }

  /** The system prompt, and a list of such that are kept. */
  system() {
    const text = make("textarea", { rows: 3, id: "system" });
    this.inputs.set("system", text);
    text.addEventListener("input", () => this.typed("system"));
    const list = make("select", { id: "presets", "aria-label": t("Saved system prompts") });
    const fill = () => list.replaceChildren(new Option(t("Choose…"), ""), ...this.presets().map(({ name }) => new Option(t(name), name)));
    list.addEventListener("change", () => {
      const found = this.presets().find(({ name }) => name === list.value);
      if (!found) return;
      text.value = found.text;
      this.typed("system");
    });
    const name = make("input", { placeholder: t("Name"), "aria-label": t("Name of this system prompt"), id: "preset-name" });
    const own = (change) => { shared.set("presets", change(shared.get("presets", []))); fill(); };
    const keep = () => {
      const kept = { name: name.value.trim(), text: text.value };
      if (!kept.name) { name.focus(); return; }
      own((presets) => [...presets.filter((each) => each.name !== kept.name), kept]);
      list.value = kept.name;
      name.value = "";
    };
    const forget = () => own((presets) => presets.filter((each) => each.name !== list.value));
    fill();
    return make("details", { open: true }, make("summary", {}, t("System prompt")), make("div", { class: "fields" },
      make("label", { class: "wide" }, t("System prompt"), text),
      make("div", { class: "row wide" }, list, make("button", { type: "button", id: "preset-forget", onclick: forget }, t("Delete"))),
      make("div", { class: "row wide" }, name, make("button", { type: "button", id: "preset-keep", onclick: keep }, t("Save")))));
  }

  presets() {
    const own = shared.get("presets", []);
    return [...PRESETS.filter(({ name }) => !own.some((each) => each.name === name)), ...own];
  }

  /** What belongs to the page, not to a conversation. */
  page(keyGiven) {
    const theme = make("select", { id: "theme" }, ...["auto", "light", "dark"].map((word) => new Option(t(word), word)));
    theme.value = shared.get("theme", "auto");
    theme.addEventListener("change", () => {
      shared.set("theme", theme.value);
      document.documentElement.dataset.theme = theme.value;
    });
    const words = make("select", { id: "language" }, new Option(t("the browser's language"), ""),
      ...Object.entries(LANGUAGES).map(([tag, name]) => new Option(name, tag)));
    words.value = shared.get("language", "");
    words.addEventListener("change", () => { shared.set("language", words.value); location.reload(); });
    const search = choice("search-files", true), pages = choice("page-images", false);
    const secret = make("input", { type: "password", id: "key", autocomplete: "off", value: key.get() });
    secret.addEventListener("change", () => { key.set(secret.value); keyGiven(); });
    this.secret = secret;
    return make("details", { id: "page-settings" }, make("summary", {}, t("This page")), make("div", { class: "fields" },
      make("label", {}, t("Theme"), theme), make("label", {}, t("Language"), words),
      make("label", { class: "wide" }, t("Send only relevant parts of long files"), search),
      make("label", { class: "wide" }, t("Send pages of PDFs as images, if the model sees them"), pages),
      make("label", { class: "wide" }, t("API key, if the server asks for one"), secret)));
  }

  /** The server asks for a key. */
  askKey() {
    this.toggle(true);
    byId("page-settings").open = true;
    this.secret.focus();
  }
}

/** A choice of yes and no that is kept for this browser. */
function choice(name, otherwise) {
  const select = make("select", { id: name }, new Option(t("yes"), "yes"), new Option(t("no"), "no"));
  select.value = shared.get(name, otherwise) ? "yes" : "no";
  select.addEventListener("change", () => shared.set(name, select.value === "yes"));
  return select;
}
