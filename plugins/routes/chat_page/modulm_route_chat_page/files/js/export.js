// Conversations as files: JSON that has all of them and everything, Markdown of what is shown.

import { newId } from "./dom.js";
import { foreign } from "./imports.js";
import { add, newConversation, path } from "./tree.js";
import { t } from "./words.js";

const FORMAT = "modulm-conversations";

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

const MARK = /^<!-- (user|assistant|reasoning|hosted|calls|attachment|tool)(?: (.*?))? -->$/;
const guarded = (text) => text.replace(/^(\\*)(<!-- (?:user|assistant|reasoning|hosted|calls|attachment|tool)\b)/gm, "$1\\$2");
const unguarded = (text) => text.replace(/^\\(\\*<!-- )/gm, "$1");

/** What is shown of a conversation. Comments tell the parts apart when it is read again. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}\n`];
  const put = (mark, title, text) => parts.push(`<!-- ${mark} -->\n${title}\n\n${guarded(text)}\n`);
  for (const node of path(conversation)) {
    if (node.role === "user") {
      put("user", "## You", node.content);
      for (const file of node.attachments ?? [])
        if (file.url) put(`attachment ${JSON.stringify(file.name)}`, `### ${file.kind} ${file.name}`, file.url);
        else put(`attachment ${JSON.stringify(file.name)}`, `### File ${file.name}`, file.text);
    } else if (node.role === "tool") put(`tool ${JSON.stringify([node.call, node.name])}`, `## Result of ${node.name}`, node.content);
    else {
      put("assistant", "## Answer", node.content);
      if (node.reasoning) put("reasoning", "### Reasoning", node.reasoning);
      if (node.hosted?.length) put("hosted", "### Calls of tool servers", JSON.stringify(node.hosted, null, 1));
      if (node.calls?.length) put("calls", "### Calls", JSON.stringify(node.calls, null, 1));
    }
  }
  return parts.join("\n");
}

/** Conversations of a file of either kind, of another page's export, or OpenAI's `{"messages": [...]}`. Throws an Error. */
export function fromText(text) {
  let table;
  try {
    table = JSON.parse(text);
  } catch {
    return [fromMarkdown(text)];
  }
  if (table?.format === FORMAT && Array.isArray(table.conversations)) return table.conversations.map(checked);
  if (Array.isArray(table?.messages)) return [fromMessages(table.messages)];
  const others = foreign(table);
  if (others) return others;
  throw new Error(t("this file has no conversations"));
}

/** A conversation of a file, with a name that no other has. */
function checked(given) {
  const whole = given && typeof given.nodes === "object" && typeof given.chosen === "object"
    && Object.values(given.nodes ?? {}).every((node) => typeof node?.content === "string" && typeof node.parent === "string");
  if (!whole) throw new Error(t("a conversation in this file is damaged"));
  return { ...newConversation(), ...given, id: newId() };
}

function fromMessages(messages) {
  const conversation = newConversation();
  let last = null;
  for (const { role, content, reasoning_content: reasoning, tool_calls: calls, mcp_calls: hosted, tool_call_id: call, name } of messages) {
    if (typeof content !== "string" && content !== null && content !== undefined) throw new Error(t("only text messages can be imported"));
    if (role === "system") conversation.settings.system = content;
    else if (role === "assistant") last = add(conversation, last, { role, content: content ?? "", reasoning, hosted,
      calls: calls?.map((each) => ({ id: each.id, ...each.function })) });
    else last = add(conversation, last, { role: role === "tool" ? "tool" : "user", content: content ?? "", call, name });
  }
  return conversation;
}

function fromMarkdown(text) {
  const conversation = newConversation();
  const sections = [];
  for (const line of text.replace(/\r\n/g, "\n").split("\n")) {
    const mark = MARK.exec(line);
    if (mark) sections.push({ kind: mark[1], given: mark[2], lines: [] });
    else sections.at(-1)?.lines.push(line);
  }
  if (!sections.length) throw new Error(t("this Markdown file was not exported from this page"));
  let last = null;
  for (const { kind, given, lines } of sections) {
    const content = unguarded(lines.slice(2).join("\n").replace(/\n$/, ""));
    if (kind === "user" || kind === "assistant") last = add(conversation, last, { role: kind, content });
    else if (kind === "tool") {
      const [call, name] = JSON.parse(given);
      last = add(conversation, last, { role: "tool", content, call, name });
    } else if (last && kind === "reasoning") last.reasoning = content;
    else if (last && kind === "hosted") last.hosted = JSON.parse(content);
    else if (last && kind === "calls") last.calls = JSON.parse(content);
    else if (last) (last.attachments ??= []).push(attachment(JSON.parse(given), lines[0], content));
  }
  const title = /^# (.+)$/m.exec(text);
  if (title) Object.assign(conversation, { title: title[1], named: true });
  return conversation;
}

/** An attachment as it was written: text, or the URL of what is none. */
function attachment(name, title, content) {
  const kind = /^### (image|audio|video) /.exec(title ?? "")?.[1];
  const url = kind && new RegExp(`^data:${kind}/[\\w.+-]+;base64,[A-Za-z0-9+/=]+$`).test(content);
  return url ? { kind, name, url: content } : { kind: "text", name, text: content };
}

/** Hand a file to the browser. */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name.replace(/[^\p{L}\p{N}. _-]+/gu, "").trim() || "conversation";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
