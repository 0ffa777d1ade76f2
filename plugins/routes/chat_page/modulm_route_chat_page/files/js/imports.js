// Conversations that other pages have exported: ChatGPT and Open WebUI.

import { add, newConversation } from "./tree.js";

/** Conversations of another page's file, or null if it is none that is known. */
export function foreign(table) {
  const list = Array.isArray(table) ? table : [table];
  if (!list.length) return null;
  if (list.every((each) => each?.mapping)) return list.map(fromChatGPT);
  if (list.every((each) => each?.chat?.history?.messages)) return list.map(fromOpenWebUI);
  return null;
}

/** A tree of messages. messages: by id, each {id, parent, role, text, model}; shown: id of the last one. */
function fromTree(messages, shown, title, times, folder) {
  const conversation = newConversation();
  const made = new Map();
  const make = (id) => {
    const message = messages.get(id);
    if (!message) return null;
    if (made.has(id)) return made.get(id);
    made.set(id, null);  // a circle in a broken file ends here
    const parent = make(message.parent);
    const kept = (message.role === "user" || message.role === "assistant") && message.text;
    const node = kept ? add(conversation, parent, { role: message.role, content: message.text }) : parent;
    if (message.role === "system" && message.text && !parent) conversation.settings.system = message.text;
    made.set(id, node);
    return node;
  };
  for (const id of messages.keys()) make(id);
  for (let id = shown; messages.has(id); id = messages.get(id).parent) {
    const node = made.get(id);
    if (node) conversation.chosen[node.parent] = node.id;
    if (!messages.get(id).parent || messages.get(id).parent === id) break;
  }
  const [created, updated] = times.map((seconds) => (Number(seconds) || Date.now() / 1000) * 1000);
  return Object.assign(conversation, { title: title || conversation.title, named: Boolean(title), created, updated,
    ...(folder && { folder }) });
}

function fromChatGPT(table) {
  const messages = new Map(Object.entries(table.mapping).map(([id, { message, parent }]) => [id, {
    parent, role: message?.author?.role,
    text: (message?.content?.parts ?? []).filter((part) => typeof part === "string").join("\n"),
  }]));
  return fromTree(messages, table.current_node, table.title, [table.create_time, table.update_time]);
}

function fromOpenWebUI(table) {
  const { chat } = table, { history } = chat;
  const messages = new Map(Object.entries(history.messages).map(([id, message]) => [id,
    { parent: message.parentId, role: message.role, text: message.content }]));
  return fromTree(messages, history.currentId, table.title ?? chat.title, [table.created_at, table.updated_at]);
}
