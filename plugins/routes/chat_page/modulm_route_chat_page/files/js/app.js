// The chat: what is on the screen, which answers are being given, and what can be done.

import { about, key, models } from "./api.js";
import { Composer } from "./composer.js";
import { announce, byId, toast } from "./dom.js";
import { Invalid } from "./fields.js";
import { ModelMenu, chats, label } from "./models.js";
import { body, continuation, toolAddress } from "./request.js";
import { Remote } from "./remote.js";
import { excerpts, isLong } from "./retrieval.js";
import { Run } from "./run.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { speak, useServer } from "./speak.js";
import { Store, draft, shared } from "./store.js";
import { Talk } from "./talk.js";
import { runTool } from "./tools.js";
import { add, choose, newConversation, parentOf, path, remove } from "./tree.js";
import { language, t } from "./words.js";

/** Rounds of tools that run by themselves between two messages of a person. */
const MOST_ROUNDS = 10;

export class App {
  constructor() {
    this.conversations = new Map();
    this.runs = new Map();
    this.lengths = new Map();
    this.facts = { attachments: ["text"], tool_origins: [] };
    this.store = new Store((id, stored) => this.elsewhere(id, stored));
    this.models = new ModelMenu({ changed: (list) => this.takeModels(list) });
    this.talk = new Talk(this);
    this.sidebar = new Sidebar(this);
    this.composer = new Composer({ send: (text, files) => this.say(text, files), stop: () => this.stop(),
      editLast: () => this.editLast(), kinds: () => this.facts.attachments });
    this.settings = new Settings({ changed: () => this.settingsChanged(), keyGiven: () => this.loadModels(),
      asDefault: () => { this.keepDefaults(); toast(t("New chats begin with these settings.")); } });
    byId("model").addEventListener("change", () => { this.current.model = byId("model").value; this.settingsChanged(); this.show(); });
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
  }

  async start() {
    for (const conversation of await this.store.all()) this.conversations.set(conversation.id, mended(conversation));
    this.open(location.hash.slice(1));
    about().then((facts) => { this.facts = facts; this.composer.recorder.offer(facts.attachments); useServer(facts.speech); this.settings.offer(facts.speech); this.show(); this.connect(); }, () => {});
    await this.loadModels();
  }

  async loadModels() {
    try {
      this.takeModels(await models());
      this.show();
      await this.exchange();
    } catch (error) {
      if (error.status === 401) this.settings.askKey();
      toast(key.get() || error.status !== 401 ? error.message : t("This server needs an API key."));
    }
  }

  /** Use the server's store of conversations, if it has one. */
  connect() {
    if (!this.facts.chat_store) return;
    this.store.remote = new Remote(async (id, conversation) => {
      await this.store.take(id, conversation);
      this.elsewhere(id, conversation && mended(conversation));
    }, (error) => toast(error.message));
    addEventListener("pagehide", () => this.store.remote.flush(this.conversations));
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.exchange(); });
    this.exchange();
  }

  async exchange() {
    try {
      await this.store.remote?.exchange(this.conversations);
    } catch (error) {
      if (error.status !== 401) toast(error.message);
    }
  }

  takeModels(list) {
    const able = list.filter(chats);
    this.embedder = list.find((model) => !chats(model) && model.tasks.includes("embed"))?.id;
    this.lengths = new Map(able.map((model) => [model.id, model.max_model_len]));
    byId("model").replaceChildren(...able.map((model) => new Option(label(model), model.id)));
    byId("model").hidden = false;
    byId("model").value = this.current?.model ?? "";
    this.models.take(list);
  }

  // What is on the screen.

  /** Show a conversation by its id, or a new one. */
  open(id) {
    const found = this.conversations.get(id);
    if (!found && this.current && !this.conversations.has(this.current.id) && !id) return;
    if (!found && id === this.current?.id) return;
    const begun = draft.get() ?? shared.get("defaults", {});
    this.current = found ?? newConversation(begun.settings, begun.model ?? "");
    history.replaceState(null, "", found ? `#${found.id}` : location.pathname + location.search);
    this.settings.show(this.current.settings);
    this.composer.moveTo(this.conversations.has(this.current.id) ? this.current.id : "");
    document.body.classList.remove("with-sidebar");
    this.show();
    this.talk.follow(true);
  }

  fresh() {
    if (this.conversations.has(this.current.id)) this.open("");
    document.body.classList.remove("with-sidebar");
    byId("text").focus();
  }

  show() {
    const { current } = this;
    if (!this.lengths.has(current.model) && this.lengths.size) [current.model] = this.lengths.keys();
    byId("model").value = current.model;
    byId("title").textContent = current.title || t("New chat");
    document.title = current.title ? `${current.title} · modulm` : "modulm";
    this.talk.show(current);
    this.composer.show(this.runs.has(current.id));
    this.sidebar.show();
    this.showContext();
  }

  /** How much of the context the conversation takes. */
  showContext() {
    const last = path(this.current).findLast((node) => node.figures?.prompt)?.figures;
    const most = this.lengths.get(this.current.model);
    const used = last ? last.prompt + last.generated : 0;
    byId("context").textContent = used && most ? t("{0} of {1} tokens of context", used.toLocaleString(language), most.toLocaleString(language)) : "";
  }

  // What can be done.

  /** Ask something. False where a setting is in the way; the text stays then. */
  say(text, attachments = []) {
    if (this.runs.has(this.current.id)) return false;
    const conversation = this.current, nodes = path(conversation);
    if (!this.sendable(conversation)) return false;
    add(conversation, nodes.at(-1) ?? null, { role: "user", content: text, ...(attachments.length && { attachments }) });
    if (!this.conversations.has(conversation.id)) {
      this.conversations.set(conversation.id, conversation);
      draft.set(null);
      history.replaceState(null, "", `#${conversation.id}`);
      this.composer.here = conversation.id;
    }
    this.answer(conversation);
    return true;
  }

  sendable(conversation) {
    try {
      body(conversation, []);
      return true;
    } catch (error) {
      if (!(error instanceof Invalid)) throw error;
      this.settings.point(error.field);
      toast(error.message);
      return false;
    }
  }

  /** Let the model answer what is shown last. */
  async answer(conversation, rounds = 0) {
    const nodes = path(conversation), last = nodes.at(-1) ?? null;
    if (this.runs.has(conversation.id) || !this.sendable(conversation)) return;
    const request = body(conversation, nodes);
    const count = request.n ?? 1, answers = [];
    for (let place = 0; place < count; place += 1)
      answers.push(add(conversation, last, { role: "assistant", state: "running", model: conversation.model }));
    choose(conversation, answers[0]);
    const searched = async (signal) => { await this.search(nodes, signal); return body(conversation, nodes); };
    await this.run(conversation, new Run(answers, searched, (node) => this.nodeChanged(conversation, node)));
    if (answers[0].state === "done" && answers[0].calls?.length && conversation.settings.run_tools === "auto" && rounds < MOST_ROUNDS)
      await this.runAll(conversation, answers[0], rounds);
  }

  /** Choose the parts of long files that fit their question. */
  async search(nodes, signal) {
    if (!this.embedder || !shared.get("search-files", true)) return;
    for (const node of nodes)
      if (node.role === "user" && !node.excerpts && isLong(node.attachments))
        node.excerpts = await excerpts(node.content, node.attachments, this.embedder, signal);
  }

  async run(conversation, run) {
    this.runs.set(conversation.id, run);
    const doing = run.done();
    this.store.put(conversation);
    if (conversation === this.current) { this.show(); this.talk.follow(true); }
    await doing;
    this.runs.delete(conversation.id);
    conversation.updated = Date.now();
    if (this.conversations.has(conversation.id)) await this.store.put(conversation);
    if (run.nodes[0].error?.status === 401) this.settings.askKey();
    if (this.models.several) this.loadModels();
    if (conversation === this.current) {
      this.show();
      this.talk.follow();
      const { state, content, error } = run.nodes[0];
      announce(state === "failed" ? t("The answer failed: {0}", error.message)
        : t(state === "done" ? "Answer done: {0}" : "Answer stopped: {0}", content.slice(0, 1000)));
    } else this.sidebar.show();
  }

  nodeChanged(conversation, node) {
    if (conversation === this.current) this.talk.changed(node);
    if (this.conversations.has(conversation.id)) this.store.soon(conversation);
  }

  /** Read a text aloud in the conversation's voice. */
  speak(text) {
    const { model, settings } = this.current;
    return speak(text, model, settings.voice?.trim());
  }

  stop() {
    this.runs.get(this.current.id)?.stop();
  }

  /** The failed turn once more; a version that gave nothing is not kept. */
  retry(node) {
    this.again(node, !node.content);
  }

  /** Another version of an answer. */
  again(node, instead = false) {
    const conversation = this.current;
    if (this.runs.has(conversation.id) || !this.sendable(conversation)) return;
    if (instead) remove(conversation, node);
    delete conversation.chosen[node.parent];
    this.answer(conversation);
  }

  /** The answer goes on where it ended. */
  async goOn(node) {
    const conversation = this.current;
    if (this.runs.has(conversation.id) || !this.sendable(conversation)) return;
    delete conversation.chosen[node.id];
    node.state = "done";
    const request = continuation(conversation, path(conversation));
    await this.run(conversation, new Run([node], () => request, (changed) => this.nodeChanged(conversation, changed)));
  }

  /** Another version of a text: a question is asked, an answer is kept. */
  edited(node, text) {
    const conversation = this.current, parent = parentOf(conversation, node);
    if (this.runs.has(conversation.id)) return;
    if (node.role === "user") {
      const { attachments } = node;
      add(conversation, parent, { role: "user", content: text.trim(), ...(attachments && { attachments }) });
      this.answer(conversation);
    } else {
      add(conversation, parent, { role: "assistant", content: text, model: node.model, ...(node.reasoning && { reasoning: node.reasoning }) });
      this.store.put(conversation);
      this.show();
    }
  }

  editLast() {
    const node = path(this.current).findLast(({ role }) => role === "user");
    if (node) this.talk.edit(node);
  }

  choose(node) {
    choose(this.current, node);
    this.store.put(this.current);
    this.show();
  }

  // Tools.

  address(call) {
    return toolAddress(this.current.settings, call.name);
  }

  keep() {
    if (this.conversations.has(this.current.id)) this.store.soon(this.current);
  }

  runCall(node, call) {
    return this.runOne(this.current, node, call);
  }

  runOn(node) {
    return this.runAll(this.current, node, 0);
  }

  /** Run one call; its result comes into the field, to be looked at and sent. */
  async runOne(conversation, node, call) {
    delete node.wrong?.[call.id];
    try {
      const given = await runTool(toolAddress(conversation.settings, call.name), call, this.facts.tool_origins);
      (node.results ??= {})[call.id] = given;
      return true;
    } catch (error) {
      (node.wrong ??= {})[call.id] = error.message;
      return false;
    } finally {
      this.nodeChanged(conversation, node);
    }
  }

  /** The server makes the calls of its tool servers, or the model reads that they were declined. */
  approve(node, yes, conversation = this.current) {
    if (this.runs.has(conversation.id)) return undefined;
    let last = node;
    for (const { id, name } of node.calls)
      last = add(conversation, last, { role: "tool", call: id, name, approve: yes, content: yes ? "approved" : "declined" });
    return this.answer(conversation);
  }

  /** The results of a node's calls go to the model. */
  give(node, texts, conversation = this.current, rounds = 0) {
    if (this.runs.has(conversation.id)) return undefined;
    let last = node;
    for (const { id, name } of node.calls) last = add(conversation, last, { role: "tool", call: id, name, content: texts[id] ?? "" });
    delete node.results;
    return this.answer(conversation, rounds);
  }

  /** All calls, then the model again; not where one has no URL or does not work. */
  async runAll(conversation, node, rounds) {
    if (!node.calls.every((call) => toolAddress(conversation.settings, call.name))) return;
    const done = await Promise.all(node.calls.map((call) => this.runOne(conversation, node, call)));
    if (done.every(Boolean)) await this.give(node, { ...node.results }, conversation, rounds + 1);
  }

  // What is kept.

  settingsChanged() {
    if (this.conversations.has(this.current.id)) this.store.soon(this.current);
    else draft.set({ settings: this.current.settings, model: this.current.model });
  }

  keepDefaults() {
    shared.set("defaults", { settings: this.current.settings, model: this.current.model });
  }

  put(conversation) {
    this.conversations.set(conversation.id, conversation);
    this.store.put(conversation);
    this.show();
  }

  remove(conversation) {
    this.runs.get(conversation.id)?.stop();
    this.conversations.delete(conversation.id);
    this.store.remove(conversation.id);
    if (conversation !== this.current) { this.sidebar.show(); return; }
    this.current = null;
    this.open("");
  }

  /** Another tab or browser has written or deleted a conversation. */
  elsewhere(id, stored) {
    if (this.runs.has(id)) return;
    if (!stored) this.conversations.delete(id);
    else this.conversations.set(id, stored);
    if (this.current?.id !== id) this.sidebar.show();
    else if (stored) { this.current = stored; this.settings.show(stored.settings); this.show(); }
    else { this.current = null; this.open(""); }
  }
}

/** A conversation as it was stored: what was being answered when the page was left is not any more. */
function mended(conversation) {
  for (const node of Object.values(conversation.nodes)) if (node.state === "running") node.state = "stopped";
  return conversation;
}
