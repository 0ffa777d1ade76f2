// Files beside a message. Each kind says which files it takes and what becomes of them; what the
// server's model takes (`about.attachments`) decides which kinds there are. Text always is.

const MOST_BYTES = 2 ** 20;

/** Kinds by name: `takes(file)`, and `read(file)` -> what is stored with the message. */
const KINDS = {
  text: { takes: () => true, read: readText },
};

/** A file as it is kept: {kind, name, text}. Throws an Error that says why it cannot be. */
export async function readFile(file, kinds = ["text"]) {
  const kind = kinds.find((name) => KINDS[name]?.takes(file));
  return { kind, name: file.name, ...(await KINDS[kind].read(file)) };
}

async function readText(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 1 MiB`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new TypeError("zero bytes");
    return { text };
  } catch {
    throw new Error(`${file.name} is not a text file`);
  }
}

/** Texts of attachments, as they go behind the message. */
export function attachedText(attachments = []) {
  return attachments.filter(({ kind }) => kind === "text").map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `\n\nFile ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  }).join("");
}
