// Conversations in the browser's database; in memory where it has none (private windows).

const NAME = "modulm", STORE = "conversations";

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

class Database {
  constructor(db) {
    this.db = db;
  }
  store(mode) {
    return this.db.transaction(STORE, mode).objectStore(STORE);
  }
  all() {
    return promised(this.store("readonly").getAll());
  }
  get(id) {
    return promised(this.store("readonly").get(id));
  }
  put(conversation) {
    const store = this.store("readwrite"), done = promised(store.put(conversation));
    // Without this the end of the page would be the end of what is being written.
    store.transaction.commit();
    return done;
  }
  remove(id) {
    return promised(this.store("readwrite").delete(id));
  }
}

class Memory {
  constructor() {
    this.kept = new Map();
  }
  async all() {
    return [...this.kept.values()];
  }
  async get(id) {
    return this.kept.get(id);
  }
  async put(conversation) {
    this.kept.set(conversation.id, conversation);
  }
  async remove(id) {
    this.kept.delete(id);
  }
}

async function open() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    return new Database(await promised(request));
  } catch {
    return new Memory();
  }
}

/** The conversations, kept as they change; other tabs are told. */
export class Store {
  constructor(changed = () => {}) {
    this.opened = open();
    this.opened.then((kept) => { this.kept = kept; });
    this.waiting = new Map();
    this.channel = new BroadcastChannel("modulm");
    this.channel.onmessage = async ({ data: id }) => changed(id, await (await this.opened).get(id));
    addEventListener("pagehide", () => this.flush());
  }
  async all() {
    return (await this.opened).all();
  }
  /** Write soon: what comes in, or is typed, is not written for every word. */
  soon(conversation) {
    if (this.waiting.has(conversation.id)) return;
    const timer = setTimeout(() => this.put(conversation), 300);
    this.waiting.set(conversation.id, { timer, conversation });
  }
  /** Write what the server's store has; null: it is deleted there. */
  async take(id, conversation) {
    if (conversation) await (await this.opened).put(conversation);
    else await (await this.opened).remove(id);
    this.channel.postMessage(id);
  }
  async put(conversation) {
    clearTimeout(this.waiting.get(conversation.id)?.timer);
    this.waiting.delete(conversation.id);
    if (this.remote) conversation.changed = Date.now();
    await (await this.opened).put(conversation);
    this.remote?.put(conversation);
    this.channel.postMessage(conversation.id);
  }
  async remove(id) {
    clearTimeout(this.waiting.get(id)?.timer);
    this.waiting.delete(id);
    await (await this.opened).remove(id);
    this.remote?.remove(id);
    this.channel.postMessage(id);
  }
  /** What waits, now: the page is being left, and nothing that is awaited would still run. */
  flush() {
    for (const { conversation, timer } of this.waiting.values()) {
      clearTimeout(timer);
      this.kept?.put(conversation);
    }
    this.waiting.clear();
  }
}

/** Small things that all conversations share. */
export const shared = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`modulm.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`modulm.${name}`, JSON.stringify(value));
    } catch {
      // A full or forbidden storage: the setting lasts as long as the page.
    }
  },
};

/** The settings of a conversation that has no message yet: of this tab, also after a reload. */
export const draft = {
  get() {
    try {
      return JSON.parse(sessionStorage.getItem("modulm.draft"));
    } catch {
      return null;
    }
  },
  set(value) {
    try {
      if (value) sessionStorage.setItem("modulm.draft", JSON.stringify(value));
      else sessionStorage.removeItem("modulm.draft");
    } catch {
      // Without storage they last as long as the page.
    }
  },
};
