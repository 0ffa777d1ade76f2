// A conversation is a tree: an edited question and an answer that was asked for again are further
// children of the same node. `chosen` says which child is shown. Plain data, as it is stored.
//
// node: {id, parent, role: "user" | "assistant" | "tool", content, state: "running" | "done" |
// "stopped" | "failed", ...} with reasoning, calls, attachments, figures and so on where there are any.

import { newId } from "./dom.js";

const ROOT = "";

export function newConversation(settings = {}, model = "") {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, model,
    settings: { ...settings }, nodes: {}, chosen: {} };
}

/** Add a node below `parent` (a node, or null for a first one) and show it. */
export function add(conversation, parent, given) {
  const node = { id: newId(), parent: parent?.id ?? ROOT, created: Date.now(), state: "done", content: "", ...given };
  conversation.nodes[node.id] = node;
  conversation.chosen[node.parent] = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** The nodes that are shown, first to last; up to `last` if that is given. */
export function path(conversation, last = null) {
  const nodes = [];
  for (let node = child(conversation, ROOT); node; node = child(conversation, node.id)) {
    nodes.push(node);
    if (node === last) break;
  }
  return nodes;
}

const child = (conversation, id) => conversation.nodes[conversation.chosen[id]];

export const parentOf = (conversation, node) => conversation.nodes[node.parent] ?? null;

/** The node and those it stands beside, the oldest first. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((each) => each.parent === node.parent);
}

/** Show this version. */
export function choose(conversation, node) {
  conversation.chosen[node.parent] = node.id;
}

/** Take a node out, with all below it; a version beside it is shown instead. */
export function remove(conversation, node) {
  for (const each of Object.values(conversation.nodes)) if (each.parent === node.id) remove(conversation, each);
  delete conversation.nodes[node.id];
  delete conversation.chosen[node.id];
  const left = versions(conversation, node);
  if (left.length) conversation.chosen[node.parent] = left.at(-1).id;
  else delete conversation.chosen[node.parent];
}

/** All that is written in a conversation, for a search. */
export function textOf(conversation) {
  return [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)].join("\n");
}
