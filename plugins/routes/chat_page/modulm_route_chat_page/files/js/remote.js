// The server's store of conversations (--chat-store). The browser's own stays the one that is shown.

import { ask, put } from "./api.js";

const PATH = "chat_page/conversations";
/** Milliseconds between two writes of a conversation that is being answered. */
const PAUSE = 2_000;

/** When a conversation was changed; `updated` is when something was last said in it. */
const changed = ({ changed: at, updated }) => at ?? updated;
const written = (conversation) => ({ updated: changed(conversation), conversation });

export class Remote {
  /** took(id, conversation): another browser changed it, or deleted it (null). failed(error). */
  constructor(took, failed) {
    Object.assign(this, { took, failed, timers: new Map() });
  }
  /** Exchange what is newer on either side. kept: the browser's conversations. */
  async exchange(kept) {
    const { data } = await (await ask(PATH)).json();
    const there = new Map(data.map((each) => [each.id, each]));
    for (const { id, updated, deleted } of data) {
      const mine = kept.get(id);
      if (deleted ? mine && changed(mine) <= updated : !mine || changed(mine) < updated)
        await this.took(id, deleted ? null : await (await ask(`${PATH}/${encodeURIComponent(id)}`)).json());
    }
    for (const mine of kept.values()) if (!there.has(mine.id) || there.get(mine.id).updated < changed(mine)) await this.write(mine);
  }
  write(conversation) {
    return put(`${PATH}/${encodeURIComponent(conversation.id)}`, written(conversation));
  }
  /** Write soon. */
  put(conversation) {
    clearTimeout(this.timers.get(conversation.id));
    this.timers.set(conversation.id, setTimeout(() => {
      this.timers.delete(conversation.id);
      this.write(conversation).catch(this.failed);
    }, PAUSE));
  }
  remove(id) {
    clearTimeout(this.timers.get(id));
    this.timers.delete(id);
    put(`${PATH}/${encodeURIComponent(id)}`, { updated: Date.now() }).catch(this.failed);
  }
  /** Write what waits. kept: the browser's conversations. */
  flush(kept) {
    for (const [id, timer] of this.timers) {
      clearTimeout(timer);
      const conversation = kept.get(id);
      // Browsers let small requests outlive a page; the rest is written when it is opened again.
      if (conversation) put(`${PATH}/${encodeURIComponent(id)}`, written(conversation), true).catch(() => {});
    }
    this.timers.clear();
  }
}
