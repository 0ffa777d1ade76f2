// Long attached files: instead of all of their text, the parts that fit the question are sent, if the
// server has an embedding model beside the one that chats.

import { ask } from "./api.js";
import { cosine } from "./vectors.js";

/** Characters of attached text from which on it is searched, and of one part. */
const LONG = 24_000, PART = 1_200;
/** Parts that are sent, that are embedded in one request, and that are embedded at all. */
const SENT = 8, BATCH = 64, MOST = 4_000;

/** Vectors by text, so that a file is embedded once as long as the page is open. */
const vectors = new Map();

const texts = (attachments = []) => attachments.filter(({ kind }) => kind === "text");

/** Whether attachments have more text than is sent whole. */
export const isLong = (attachments) => texts(attachments).reduce((sum, { text }) => sum + text.length, 0) > LONG;

/** A text in parts, which end where a paragraph does, a line, or a word. */
export function partsOf(text) {
  const parts = [];
  for (let rest = text; rest;) {
    const whole = rest.slice(0, PART);
    const end = [/\n\s*\n/g, /\n/g, /\s/g].map((border) => [...whole.matchAll(border)].at(-1))
      .find((found) => found && found.index > PART / 3);
    const size = rest.length > PART && end ? end.index + end[0].length : whole.length;
    parts.push(rest.slice(0, size));
    rest = rest.slice(size);
  }
  return parts.filter((part) => part.trim());
}

/** Parts of attachments that fit a question, as attachments: in the order of the text, one for each file. */
export async function excerpts(question, attachments, model, signal) {
  const parts = texts(attachments).flatMap(({ name, text }) => partsOf(text).map((part) => ({ name, part })));
  if (parts.length > MOST) throw new Error(`${parts.length} parts of ${PART} characters are more than ${MOST}`);
  const [asked, ...found] = await embed([question, ...parts.map(({ part }) => part)], model, signal);
  const best = found.map((vector, place) => [cosine(asked, vector), place]).sort(([a], [b]) => b - a)
    .slice(0, SENT).map(([, place]) => place).sort((a, b) => a - b);
  const files = new Map();
  for (const place of best) {
    const { name, part } = parts[place];
    files.set(name, [...(files.get(name) ?? []), part.trim()]);
  }
  return [...files].map(([name, chosen]) => ({ kind: "text", name: `${name} (parts)`, text: chosen.join("\n\n[…]\n\n") }));
}

async function embed(inputs, model, signal) {
  const name = (text) => `${model}\n${text}`;
  const missing = [...new Set(inputs)].filter((text) => !vectors.has(name(text)));
  for (let place = 0; place < missing.length; place += BATCH) {
    const input = missing.slice(place, place + BATCH);
    const response = await ask("v1/embeddings", { model, input, encoding_format: "float", truncate_prompt_tokens: -1 }, signal);
    const { data } = await response.json();
    for (const { index, embedding } of data) vectors.set(name(input[index]), embedding);
  }
  return inputs.map((text) => vectors.get(name(text)));
}
