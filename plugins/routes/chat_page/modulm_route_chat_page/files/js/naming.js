// Titles that the model gives to conversations.

import { ask } from "./api.js";
import { path } from "./tree.js";

const ASK = "Give this conversation a title of at most six words. Answer with the title only.";
/** Characters of each message, and messages, that the model reads. */
const MOST = 1000, FIRST = 6;

/** A title for a conversation, from the model that answered it. Throws Refused. */
export async function nameOf(conversation) {
  const said = path(conversation).slice(0, FIRST).filter(({ content }) => content)
    .map(({ role, content }) => `${role}: ${content.slice(0, MOST)}`).join("\n\n");
  const response = await ask("v1/chat/completions", { model: conversation.model, temperature: 0, max_tokens: 60,
    chat_template_kwargs: { enable_thinking: false }, messages: [{ role: "user", content: `${ASK}\n\n${said}` }] });
  const { content } = (await response.json()).choices[0].message;
  const line = (content ?? "").trim().split("\n")[0].replace(/^["'“*#\s]+|["'”*.\s]+$/g, "");
  return line.slice(0, 60);
}
