// One message on the screen.

import { preview } from "./attachments.js";
import { callsView, hostedView } from "./calls.js";
import { copyBy } from "./copy.js";
import { icon, iconButton, make } from "./dom.js";
import { described, duration } from "./figures.js";
import { Markdown } from "./markdown.js";
import { canSpeak } from "./speak.js";
import { tokensView } from "./tokens.js";
import { t } from "./words.js";

/**
 * The view of a node. `act` is what can be done with it (see app.js); `update(place)` shows the node as
 * it is now, with place = {versions, results, last}: the node's versions, results of its calls by
 * id, and whether it is the last that is shown.
 */
export class MessageView {
  constructor(node, act) {
    Object.assign(this, { message: node, act, tokens: false, editing: false });
    this.body = make("div", { class: "body" });
    this.foot = make("footer", { class: "foot" });
    const name = t(node.role === "user" ? "Your message" : "Answer");
    this.node = make("article", { class: node.role, "aria-label": name, id: `m-${node.id}` }, this.body, this.foot);
    if (node.role !== "user") this.dress();
  }

  dress() {
    this.markdown = new Markdown();
    this.thought = make("details", { class: "thought" }, make("summary"), make("div", { class: "said" }));
    this.extra = make("div");
    this.player = make("audio", { controls: true, preload: "metadata", hidden: true, "aria-label": t("The answer as audio") });
    this.body.append(this.thought, this.player, this.markdown.node, this.extra);
    this.thought.addEventListener("click", () => { this.touched = true; });
  }

  update(place = this.place) {
    this.place = place;
    if (this.editing) return;
    if (this.message.role === "user") this.updateQuestion();
    else this.updateAnswer();
    this.updateFoot();
  }

  updateQuestion() {
    const { content, attachments = [], excerpts = [] } = this.message;
    const file = ({ name, text }) => make("details", { class: "file" }, make("summary", {}, icon("clip"), name), make("pre", { tabIndex: 0 }, text));
    const files = attachments.filter(({ kind }) => kind === "text").map(file);
    if (excerpts.length) files.push(make("p", { class: "faint" }, t("Excerpts that were sent")), ...excerpts.map(file));
    const media = attachments.filter(({ kind }) => kind !== "text").map(preview);
    this.body.replaceChildren(...(media.length ? [make("div", { class: "media" }, ...media)] : []),
      ...(content || !media.length ? [make("div", { class: "said" }, content)] : []), ...files);
  }

  updateAnswer() {
    const { content, reasoning, state, calls, hosted, logprobs } = this.message;
    const running = state === "running", thinking = running && !content && !calls?.length;
    this.node.classList.toggle("running", running);
    this.node.setAttribute("aria-busy", String(running));
    this.thought.hidden = !reasoning;
    if (reasoning) this.updateThought(reasoning, thinking);
    const asTokens = this.tokens && Boolean(logprobs?.length);
    this.markdown.node.hidden = asTokens;
    if (!asTokens) this.markdown.set(content, running);
    this.updatePlayer();
    this.extra.replaceChildren(...[asTokens && tokensView(logprobs), hosted?.length && hostedView(hosted), calls?.length && this.calls(),
      state === "failed" && this.failure()].filter(Boolean));
  }

  /** The same sound goes on playing. */
  updatePlayer() {
    const { sound } = this.message;
    this.player.hidden = !sound;
    if (sound && this.player.src !== sound) this.player.src = sound;
  }

  updateThought(reasoning, thinking) {
    const { thought } = this.message;
    const done = thought ? t("Thought for {0}", duration(thought)) : t("Thought");
    this.thought.firstChild.textContent = thinking ? t("Thinking…") : done;
    this.thought.lastChild.textContent = reasoning;
    if (!this.touched) this.thought.open = thinking;
  }

  calls() {
    const { act, message } = this;
    return callsView(message, this.place.results, (call) => act.address(call), {
      run: (call) => act.runCall(message, call),
      runOn: () => act.runOn(message),
      give: (texts) => act.give(message, texts),
      approve: (yes) => act.approve(message, yes),
      note: (call, text) => { (message.results ??= {})[call.id] = text; act.keep(); },
    });
  }

  failure() {
    const { act, message } = this;
    return make("div", { class: "failure", role: "alert" }, make("p", { class: "error" }, message.error?.message ?? t("failed")),
      make("p", { class: "faint" }, t("This turn is not sent with later messages.")),
      make("button", { type: "button", class: "retry", onclick: () => act.retry(message) }, t("Try again")),
      message.content && make("button", { type: "button", onclick: () => act.goOn(message) }, t("Continue")));
  }

  updateFoot() {
    const { act, message } = this, { state, role } = message, answer = role === "assistant";
    if (state === "running") {
      this.foot.replaceChildren(make("span", { class: "figures busy" }, described(message.figures)));
      return;
    }
    const copy = iconButton("copy", t("Copy"), () => copyBy(copy, message.content));
    const ended = { length: t("cut at the limit"), stopped: t("stopped") }[state === "stopped" ? state : message.finish];
    this.foot.replaceChildren(...[this.versions(), copy, iconButton("edit", t("Edit"), () => this.edit()),
      answer && iconButton("again", t("Regenerate"), () => act.again(message)),
      answer && this.canGoOn() && iconButton("go", t("Continue"), () => act.goOn(message)),
      answer && canSpeak() && message.content && iconButton("speak", t("Read aloud"), () => act.speak(this.markdown.node.innerText)),
      answer && message.logprobs?.length && iconButton("tokens", t("Tokens"), () => this.toggleTokens(), { "aria-pressed": String(this.tokens) }),
      answer && make("span", { class: "figures" }, [described(message.figures), ended].filter(Boolean).join(" · ")),
    ].filter(Boolean));
  }

  canGoOn() {
    const { content, calls, finish, state } = this.message;
    return this.place.last && content && !calls?.length && (finish === "length" || state === "stopped");
  }

  versions() {
    const { versions } = this.place;
    if (versions.length < 2) return null;
    const here = versions.indexOf(this.message);
    const step = (by, name, label) => iconButton(name, label, () => this.act.choose(versions[here + by]), { disabled: !versions[here + by] });
    return make("span", { class: "versions", role: "group", "aria-label": t("Versions") }, step(-1, "left", t("Previous version")),
      `${here + 1}/${versions.length}`, step(1, "right", t("Next version")));
  }

  toggleTokens() {
    this.tokens = !this.tokens;
    this.update();
  }

  /** A field in place of the text; what comes of it is a version beside this one. */
  edit() {
    const { act, message } = this, answer = message.role === "assistant";
    const field = make("textarea", { value: message.content, "aria-label": t("Edit"), rows: Math.min(16, message.content.split("\n").length + 1) });
    const close = () => { this.editing = false; form.replaceWith(this.body); this.update(); };
    const form = make("form", { class: "edit", onsubmit: (event) => {
      event.preventDefault();
      close();
      act.edited(message, field.value);
    } }, field, make("div", { class: "row" }, make("button", { type: "button", onclick: close }, t("Cancel")),
      make("button", { class: "main" }, t(answer ? "Save" : "Send"))));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
      // A question is sent as in the message's own field; an answer has lines.
      if (answer && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.editing = true;
    this.body.replaceWith(form);
    this.foot.replaceChildren();
    field.focus();
  }
}
