// The list of conversations: open, search, rename, delete, export, import.

import { byId, icon, make, toast } from "./dom.js";
import { download, fromText, toJson, toMarkdown } from "./export.js";
import { nameOf } from "./naming.js";
import { shared } from "./store.js";
import { textOf } from "./tree.js";
import { t } from "./words.js";

export class Sidebar {
  /** app: {conversations, current, runs, open, put, remove}. */
  constructor(app) {
    this.app = app;
    byId("search").addEventListener("input", () => this.show());
    byId("export-all").addEventListener("click", () =>
      download("modulm-conversations.json", toJson([...app.conversations.values()]), "application/json"));
    this.file = make("input", { type: "file", accept: ".json,.md,application/json,text/markdown", multiple: "", class: "unseen",
      "aria-label": t("Conversations to import"), id: "import-file", tabIndex: -1, onchange: () => this.import([...this.file.files]) });
    byId("import").after(this.file);
    byId("import").addEventListener("click", () => this.file.click());
  }

  show() {
    const { app } = this, wanted = byId("search").value.trim().toLowerCase();
    const found = [...app.conversations.values()].sort((a, b) => b.updated - a.updated)
      .filter((each) => !wanted || textOf(each).toLowerCase().includes(wanted));
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    byId("conversations").replaceChildren(...this.folders(found, wanted), ...found.filter((each) => !each.folder || wanted).map((each) => this.row(each, wanted)));
    if (focused) document.querySelector(`#conversations li[data-id="${focused}"] button`)?.focus();
    if (!found.length) byId("conversations").append(make("li", { class: "faint none" }, wanted ? t("Nothing found") : t("No conversations yet")));
  }

  /** The folders, by name; a search looks into all of them. */
  folders(found, wanted) {
    if (wanted) return [];
    const names = [...new Set(found.map(({ folder }) => folder).filter(Boolean))].sort((a, b) => a.localeCompare(b));
    const closed = shared.get("folders-closed", []);
    return names.map((name) => make("li", { class: "folder" },
      make("details", { open: !closed.includes(name), ontoggle: ({ target }) =>
        shared.set("folders-closed", [...shared.get("folders-closed", []).filter((each) => each !== name), ...(target.open ? [] : [name])]) },
      make("summary", {}, name), make("ul", { "aria-label": name }, ...found.filter(({ folder }) => folder === name).map((each) => this.row(each, wanted))))));
  }

  row(conversation, wanted) {
    const { app } = this, here = conversation === app.current;
    const open = make("button", { type: "button", class: "open", onclick: () => app.open(conversation.id), "aria-current": here ? "page" : undefined },
      make("span", { class: "name" }, conversation.title || t("Untitled")), this.excerpt(conversation, wanted));
    const more = make("button", { type: "button", class: "icon more", "aria-haspopup": "true",
      "aria-label": t("More about {0}", conversation.title), onclick: () => this.menu(more, conversation) }, icon("more"));
    return make("li", { "data-id": conversation.id, class: [here && "here", app.runs.has(conversation.id) && "busy"].filter(Boolean).join(" ") }, open, more);
  }

  /** The line in which a search found something. */
  excerpt(conversation, wanted) {
    if (!wanted || conversation.title.toLowerCase().includes(wanted)) return null;
    const line = textOf(conversation).split("\n").find((each) => each.toLowerCase().includes(wanted)) ?? "";
    const at = Math.max(0, line.toLowerCase().indexOf(wanted) - 20);
    return make("span", { class: "faint" }, `${at ? "…" : ""}${line.slice(at, at + 60)}`);
  }

  menu(button, conversation) {
    const menu = byId("menu");
    const item = (label, act) => make("button", { type: "button", onclick: () => { menu.hidePopover(); act(); } }, label);
    const name = conversation.title || "conversation";
    menu.replaceChildren(
      item(t("Rename"), () => this.rename(conversation)),
      item(t("Move to a folder"), () => this.move(conversation)),
      item(t("Generate a name"), () => this.nameByModel(conversation)),
      item(t("Export as Markdown"), () => download(`${name}.md`, toMarkdown(conversation), "text/markdown")),
      item(t("Export as JSON"), () => download(`${name}.json`, toJson([conversation]), "application/json")),
      item(t("Delete"), () => this.delete(conversation)));
    const place = button.getBoundingClientRect();
    menu.style.left = `${Math.min(place.left, innerWidth - 200)}px`;
    menu.style.top = `${Math.min(place.bottom, innerHeight - 230)}px`;
    menu.showPopover();
    menu.firstChild.focus();
  }

  rename(conversation) {
    this.write(conversation, conversation.title, t("Name of the conversation"), (title) => title && { title, named: true });
  }

  /** An empty name takes it out of its folder. */
  move(conversation) {
    this.write(conversation, conversation.folder ?? "", t("Name of the folder"), (folder) => ({ folder }));
  }

  /** A field in place of the row; made(text) is what it changes, if anything. */
  write(conversation, value, label, made) {
    const row = document.querySelector(`#conversations li[data-id="${conversation.id}"]`);
    const field = make("input", { value, "aria-label": label, placeholder: label, class: "rename" });
    const end = (keep) => {
      const change = keep && made(field.value.trim());
      if (change) {
        Object.assign(conversation, change);
        this.app.put(conversation);
      }
      this.show();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => { if (field.isConnected) end(true); });
    row.replaceChildren(field);
    field.select();
  }

  async nameByModel(conversation) {
    try {
      const title = await nameOf(conversation);
      if (!title) return;
      Object.assign(conversation, { title, named: true });
      this.app.put(conversation);
      this.app.show();
    } catch (error) {
      toast(error.message);
    }
  }

  delete(conversation) {
    this.app.remove(conversation);
    toast(t("Deleted “{0}”.", conversation.title || t("Untitled")), t("Undo"), () => this.app.put(conversation));
  }

  async import(files) {
    let count = 0;
    for (const file of files) {
      try {
        for (const conversation of fromText(await file.text())) {
          this.app.put(conversation);
          count += 1;
        }
      } catch (error) {
        toast(`${file.name}: ${error.message}`);
        return;
      }
    }
    this.file.value = "";
    toast(t("{0} imported.", count));
  }
}
