// The conversation on the screen: a view for each node that is shown.

import { byId, make } from "./dom.js";
import { MessageView } from "./message.js";
import { path, versions } from "./tree.js";
import { t } from "./words.js";

/** First questions that are offered: the embedded model can answer them. */
const TRIES = ["What is the capital of France?", "What is 17 plus 25?", "What can you do?"];

export class Talk {
  constructor(act) {
    this.act = act;
    this.views = new Map();
    this.node = byId("talk");
    this.dirty = new Set();
  }

  /** Show a conversation; views of nodes that were shown before stay. */
  show(conversation) {
    this.conversation = conversation;
    const nodes = path(conversation), shown = [], views = new Map();
    nodes.forEach((node, place) => {
      if (node.role === "tool") return;
      const view = this.views.get(node.id)?.message === node ? this.views.get(node.id) : new MessageView(node, this.act);
      view.update({ versions: versions(conversation, node), results: resultsOf(nodes, place), last: node === nodes.at(-1) });
      views.set(node.id, view);
      shown.push(view.node);
    });
    this.views = views;
    // Those that stay keep their place, so that focus and selection do.
    shown.forEach((node, place) => {
      if (this.node.children[place] !== node) this.node.insertBefore(node, this.node.children[place] ?? null);
    });
    while (this.node.children.length > shown.length) this.node.lastChild.remove();
    if (!shown.length) this.node.append(this.hello());
  }

  /** A node has changed: show that with the next frame. */
  changed(node) {
    if (!this.views.has(node.id)) return;
    if (!this.dirty.size) requestAnimationFrame(() => this.draw());
    this.dirty.add(node.id);
  }

  draw() {
    for (const id of this.dirty) this.views.get(id)?.update();
    this.dirty.clear();
    this.follow();
  }

  /** Stay at the end, unless somebody reads further up. */
  follow(always = false) {
    const page = byId("main");
    if (always || page.scrollHeight - page.scrollTop - page.clientHeight < 160) page.scrollTop = page.scrollHeight;
  }

  edit(node) {
    this.views.get(node.id)?.edit();
  }

  hello() {
    const tries = TRIES.map((words) => make("button", { type: "button", onclick: () => this.act.say(words) }, words));
    return make("section", { id: "hello" }, make("h2", {}, t("What shall we talk about?")), make("div", {}, ...tries));
  }
}

/** Results of the calls of the node at `place`, by call id; undefined while there are none. */
function resultsOf(nodes, place) {
  const results = {};
  for (let next = place + 1; nodes[next]?.role === "tool"; next += 1) results[nodes[next].call] = nodes[next].content;
  return Object.keys(results).length ? results : undefined;
}
