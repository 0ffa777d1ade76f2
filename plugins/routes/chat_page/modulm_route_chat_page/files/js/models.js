// The models of a server of several: their states and memory, and buttons that load and stop them.

import { ask, models } from "./api.js";
import { byId, make, toast } from "./dom.js";
import { t } from "./words.js";

const MIB = 2 ** 20;
/** Milliseconds between two looks at the states while the menu is open. */
const LOOK = 2000;

/** A model's name in the list, with its state on a server of several. */
export function label({ id, status }) {
  return status ? `${id} (${t(status.value)})` : id;
}

/** Whether a model can chat, as far as is known before it is loaded. */
export function chats({ tasks }) {
  return !tasks?.length || tasks.includes("generate");
}

export class ModelMenu {
  constructor({ changed }) {
    this.changed = changed;
    this.dialog = byId("models");
    byId("open-models").addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", () => clearInterval(this.timer));
  }

  /** Take a new list of models. The button is hidden on a server of one model. */
  take(list) {
    this.list = list.filter(({ id, root, status }) => status && id === root);
    byId("open-models").hidden = !this.several;
    if (this.dialog.open) this.show();
  }

  get several() {
    return Boolean(this.list?.length);
  }

  open() {
    this.show();
    this.dialog.showModal();
    this.timer = setInterval(() => this.look(), LOOK);
    this.look();
  }

  async look() {
    try {
      this.changed(await models());
    } catch (error) {
      toast(error.message);
      this.dialog.close();
    }
  }

  show() {
    const focused = document.activeElement?.dataset.act;
    const largest = Math.max(...this.list.map(({ status }) => status.memory), 1);
    const limit = this.list[0]?.status.memory_budget ?? largest;
    this.dialog.replaceChildren(make("h2", { id: "models-title" }, t("Models")),
      make("ul", { class: "models" }, ...this.list.map((model) => this.row(model, limit))),
      make("form", { method: "dialog", onsubmit: (event) => { event.preventDefault(); this.dialog.close(); } },
        make("button", { class: "main", "data-act": "close" }, t("Close"))));
    if (focused) this.dialog.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
  }

  row({ id, status }, limit) {
    const held = ["loaded", "sleeping", "stopping"].includes(status.value);
    const size = status.memory ? t(held ? "{0} MiB" : "about {0} MiB", Math.round(status.memory / MIB)) : "";
    const requests = status.active_requests + status.waiting_requests;
    const act = held ? "unload" : "load";
    const busy = ["loading", "stopping"].includes(status.value);
    return make("li", { "data-model": id },
      make("strong", {}, id), make("span", { class: "faint" }, [t(status.value), size, requests ? t("{0} requests", requests) : ""].filter(Boolean).join(", ")),
      make("meter", { min: 0, max: limit, value: held || busy ? status.memory : 0, "aria-label": t("Memory of {0}", id) }),
      make("button", { type: "button", disabled: busy, "data-act": `${act} ${id}`, onclick: () => this.act(act, id) }, t(held ? "Stop" : "Load")),
      status.error && make("p", { class: "wrong" }, status.error));
  }

  async act(act, model) {
    const doing = ask(`models/${act}`, { model });
    this.look();
    try {
      await doing;
    } catch (error) {
      toast(error.message);
    }
    this.look();
  }
}
