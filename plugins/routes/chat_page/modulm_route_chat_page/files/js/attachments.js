// Files beside a message. Each kind says which files it takes and what becomes of them; what the
// server's model takes (`about.attachments`) decides which kinds there are. Text always is.

import { ask } from "./api.js";
import { make } from "./dom.js";
import { shared } from "./store.js";
import { t } from "./words.js";

const MOST_BYTES = 2 ** 20;
/** Bytes of an image that is sent as it is, the side to which larger ones are drawn, and of others. */
const IMAGE_BYTES = 8 * 2 ** 20, SIDE = 2048, MEDIA_BYTES = 40 * 2 ** 20;
/** What every server decodes; other images are drawn anew. */
const PLAIN = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);

/** Documents that the server reads, as text and page images, and how many pages at most. */
const DOCUMENT = /\.(pdf|docx|xlsx|pptx)$/i, DOCUMENT_BYTES = 40 * 2 ** 20, PAGES = 16;

/** Kinds by name: `takes(file)`, and `read(file)` -> what is stored with the message. */
const KINDS = {
  image: { takes: (file) => file.type.startsWith("image/"), read: readImage },
  audio: { takes: (file) => file.type.startsWith("audio/"), read: readMedia },
  video: { takes: (file) => file.type.startsWith("video/"), read: readMedia },
  text: { takes: () => true, read: readText },
};

/** A file as it is kept: {kind, name, text} or {kind, name, url}; a list for documents. Throws an Error that says why it cannot be. */
export async function readFile(file, kinds = ["text"]) {
  if (DOCUMENT.test(file.name)) return readDocument(file, kinds.includes("image"));
  const kind = Object.keys(KINDS).find((name) => KINDS[name].takes(file));
  if (!kinds.includes(kind) && kind !== "text" && file.type !== "image/svg+xml")
    throw new Error(t("{0}: this model does not support {1}", file.name, t(kind === "image" ? "images" : kind)));
  const taken = kinds.includes(kind) ? kind : "text";
  return { kind: taken, name: file.name, ...(await KINDS[taken].read(file)) };
}

async function readText(file) {
  if (file.size > MOST_BYTES) throw new Error(t("{0} is larger than {1} MiB", file.name, 1));
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new TypeError("zero bytes");
    return { text };
  } catch {
    throw new Error(t("{0} is not a text file", file.name));
  }
}

/** The text of a document; its pages as images where the model sees them and there is no text, or the settings ask for them. */
async function readDocument(file, sees) {
  if (file.size > DOCUMENT_BYTES) throw new Error(t("{0} is larger than {1} MiB", file.name, DOCUMENT_BYTES / 2 ** 20));
  let read;
  try {
    const url = await dataUrl(file);
    const response = await ask("v1/documents", { name: file.name, data: url.slice(url.indexOf(",") + 1), pages: sees ? PAGES : 0 });
    read = await response.json();
  } catch (error) {
    throw error.status === 404 ? new Error(t("{0}: this server reads no documents; whoever runs it can install modulm[documents]", file.name)) : error;
  }
  const { text, pages } = read, shown = !text.trim() || shared.get("page-images", false) ? pages : [];
  if (!text.trim() && !shown.length) throw new Error(t("{0} has no text", file.name));
  return [...(text.trim() ? [{ kind: "text", name: file.name, text }] : []),
    ...shown.map((url, place) => ({ kind: "image", name: `${file.name} ${place + 1}`, url }))];
}

async function readImage(file) {
  if (PLAIN.has(file.type) && file.size <= IMAGE_BYTES) return readMedia(file);
  try {
    const picture = await createImageBitmap(file);
    const part = Math.min(1, SIDE / Math.max(picture.width, picture.height));
    const canvas = make("canvas", { width: Math.round(picture.width * part), height: Math.round(picture.height * part) });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    return { url: canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.92) };
  } catch {
    throw new Error(t("{0} is not an image that this browser can show", file.name));
  }
}

async function readMedia(file) {
  if (file.size > MEDIA_BYTES) throw new Error(t("{0} is larger than {1} MiB", file.name, MEDIA_BYTES / 2 ** 20));
  const url = await dataUrl(file);
  // Parameters of a type, as codecs, may hold commas; the server looks at the content anyhow.
  return { url: `data:${file.type.split(";")[0]};base64,${url.slice(url.indexOf(";base64,") + 8)}` };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(t("{0} cannot be read", file.name)));
    reader.readAsDataURL(file);
  });
}

/** Texts of attachments, as they go behind the message. */
export function attachedText(attachments = []) {
  return attachments.filter(({ kind }) => kind === "text").map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `\n\nFile ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  }).join("");
}

/** Images, sound and video of attachments as parts of a message, which come before its text. */
export function attachedMedia(attachments = []) {
  return attachments.filter(({ kind }) => kind !== "text").map(({ kind, url }) => {
    if (kind !== "audio") return { type: `${kind}_url`, [`${kind}_url`]: { url } };
    const [head, data] = url.split(",");
    return { type: "input_audio", input_audio: { data, format: head.slice("data:audio/".length).split(";")[0] } };
  });
}

/** What is seen of an attachment that is no text. */
export function preview({ kind, name, url }) {
  if (kind === "image") return make("img", { src: url, alt: name, title: name });
  return make(kind, { src: url, controls: "", "aria-label": name, title: name, preload: "metadata" });
}
