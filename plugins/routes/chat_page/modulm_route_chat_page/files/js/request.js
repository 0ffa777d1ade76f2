// From a conversation and its settings to the body of a request.

import { attachedMedia, attachedText } from "./attachments.js";
import { FIELDS, Invalid, valueOf } from "./fields.js";
import { t } from "./words.js";

/** Fields that are sent under their own name. */
const OWN = new Set(["format", "constraint", "thinking", "tools", "run_tools", "top_logprobs", "extra", "chat_template_kwargs", "spoken", "voice"]);

/** What is sent of a list of nodes. Turns that failed, or gave nothing, are left out. */
export function history(nodes) {
  const sent = [];
  for (const node of nodes) {
    if (node.role === "assistant" && !answered(node)) {
      if (sent.at(-1)?.role === "user") sent.pop();
    } else sent.push(message(node));
  }
  return sent;
}

const answered = (node) => node.state !== "failed"
  && Boolean(node.content || node.calls?.length || node.hosted?.length);

function message(node) {
  if (node.role === "user") return { role: "user", content: asked(node) };
  if (node.role === "tool" && node.approve !== undefined)
    return { role: "tool", tool_call_id: node.call, name: node.name, approve: node.approve };
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, name: node.name, content: node.content };
  const made = { role: "assistant", content: node.content };
  if (node.reasoning) made.reasoning_content = node.reasoning;
  if (node.hosted?.length) made.mcp_calls = node.hosted;
  if (node.calls?.length)
    made.tool_calls = node.calls.map((call) => (
      { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return made;
}

/** Text alone is sent as such; media come before it. */
function asked({ content, attachments, excerpts }) {
  const text = content + attachedText(excerpts ?? attachments), media = attachedMedia(attachments);
  if (!media.length) return text;
  return text ? [...media, { type: "text", text }] : media;
}

/** The body of a request. Throws Invalid for a setting that cannot be sent. */
export function body(conversation, nodes) {
  const { settings } = conversation;
  const system = (settings.system ?? "").trim();
  const made = {
    model: conversation.model, stream: true, include_metrics: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history(nodes)],
  };
  const values = {};
  for (const field of FIELDS) values[field.name] = valueOf(field, settings[field.name]);
  for (const [name, value] of Object.entries(values))
    if (value !== undefined && !OWN.has(name)) made[name] = value;
  if (values.top_logprobs !== undefined) Object.assign(made, { logprobs: true, top_logprobs: values.top_logprobs });
  if (values.tools?.length) made.tools = toolsOf(values.tools).map(({ url, ...tool }) => tool);
  else for (const name of ["tool_choice", "parallel_tool_calls"]) delete made[name];
  if (values.spoken) Object.assign(made, { modalities: ["text", "audio"], audio: { format: "pcm16", ...(values.voice && { voice: values.voice }) } });
  const thinking = values.thinking ? { enable_thinking: values.thinking === "on" } : {};
  const variables = { ...thinking, ...values.chat_template_kwargs };
  if (Object.keys(variables).length) made.chat_template_kwargs = variables;
  return { ...made, ...form(values.format, values.constraint ?? ""), ...values.extra };
}

/** The same for an answer that goes on where it ended. */
export function continuation(conversation, nodes) {
  return { ...body(conversation, nodes), continue_final_message: true, add_generation_prompt: false, n: 1 };
}

function toolsOf(tools) {
  if (!Array.isArray(tools)) throw new Invalid({ name: "tools", label: "Tools" }, t("an array is needed"));
  return tools;
}

/** Where a tool of the settings is run, or undefined. */
export function toolAddress(settings, name) {
  try {
    const tools = valueOf(FIELDS.find((field) => field.name === "tools"), settings.tools) ?? [];
    return tools.find?.((tool) => tool?.function?.name === name)?.url;
  } catch {
    return undefined;
  }
}

function form(kind, text) {
  switch (kind) {
    case "json_object": return { response_format: { type: "json_object" } };
    case "json_schema": return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: schema(text) } } };
    case "regex": return { structured_outputs: { regex: text } };
    case "grammar": return { structured_outputs: { grammar: text } };
    case "choice": return { structured_outputs: { choice: text.split("\n").filter(Boolean) } };
    default: return {};
  }
}

function schema(text) {
  const field = { name: "constraint", label: "JSON schema", kind: "json" };
  const found = valueOf(field, text);
  if (found === undefined) throw new Invalid(field, t("is missing"));
  return found;
}
