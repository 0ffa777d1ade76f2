// Where a message is written: text, files, send or stop.

import { preview, readFile } from "./attachments.js";
import { byId, icon, iconButton, make, toast } from "./dom.js";
import { Recorder } from "./recorder.js";
import { t } from "./words.js";

export class Composer {
  /** send(text, attachments), stop(), editLast(); kinds(): of attachments that are taken. */
  constructor({ send, stop, editLast, kinds }) {
    Object.assign(this, { send, stop, kinds, text: byId("text"), form: byId("composer"), attached: [], running: false, drafts: new Map(), here: null });
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.text.addEventListener("input", () => this.fit());
    this.text.addEventListener("keydown", (event) => this.key(event, editLast));
    this.files = make("input", { type: "file", multiple: "", class: "unseen", tabIndex: -1, id: "files", "aria-label": t("Files to attach"),
      onchange: () => { this.attach([...this.files.files]); this.files.value = ""; } });
    this.form.append(this.files);
    byId("attach").addEventListener("click", () => this.files.click());
    this.recorder = new Recorder((file) => this.attach([file]));
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => { event.preventDefault(); this.attach([...event.dataTransfer.files]); });
    this.text.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.attach([...event.clipboardData.files]);
    });
  }

  submit() {
    if (this.running) { this.stop(); return; }
    const text = this.text.value.trim();
    if (!text && !this.attached.length) return;
    const sent = this.send(text, this.attached);
    if (!sent) return;
    this.set("", []);
  }

  key(event, editLast) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.running) this.submit();
    } else if (event.key === "Escape" && this.running) this.stop();
    else if (event.key === "ArrowUp" && !this.text.value && !this.running) { event.preventDefault(); editLast(); }
  }

  set(text, attached) {
    this.text.value = text;
    this.attached = attached;
    this.fit();
    this.showAttached();
  }

  /** What was begun in one conversation stays with it. */
  moveTo(id) {
    if (this.here === id) return;
    if (this.here !== null) this.drafts.set(this.here, [this.text.value, this.attached]);
    this.here = id;
    this.set(...(this.drafts.get(id) ?? ["", []]));
  }

  fit() {
    this.text.style.height = "";
    this.text.style.height = `${this.text.scrollHeight + 2}px`;
  }

  async attach(files) {
    for (const file of files) {
      try {
        this.attached = [...this.attached, ...[await readFile(file, this.kinds())].flat()];
      } catch (error) {
        toast(error.message);
      }
    }
    this.showAttached();
  }

  showAttached() {
    const list = byId("attachments");
    list.hidden = !this.attached.length;
    list.replaceChildren(...this.attached.map((each) => make("li", { class: each.kind }, each.kind === "text" ? icon("clip") : preview(each), each.kind === "text" && each.name,
      iconButton("close", t("Remove {0}", each.name), () => { this.attached = this.attached.filter((other) => other !== each); this.showAttached(); }))));
  }

  show(running) {
    this.running = running;
    const button = byId("send"), label = t(running ? "Stop" : "Send");
    if (button.getAttribute("aria-label") === label) return;
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(icon(running ? "stop" : "send"));
  }
}
