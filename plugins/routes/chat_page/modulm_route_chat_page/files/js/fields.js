// The fields of a request that can be set, and how what was typed becomes their value.

import { t } from "./words.js";

const THINKING = [["", "default"], ["on", "on"], ["off", "off"]];
const YES_NO = [["", "server's default"], ["true", "yes"], ["false", "no"]];

/** Groups of the settings: [title, fields]. kind: what `valueOf` makes of it. */
export const GROUPS = [
  ["Sampling", [
    { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.05 },
    { name: "top_p", label: "Top p", kind: "number", min: 0.01, max: 1, step: 0.01 },
    { name: "top_k", label: "Top k", kind: "integer", min: -1 },
    { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01 },
    { name: "seed", label: "Seed", kind: "integer", hint: "none" },
    { name: "n", label: "Answers", kind: "integer", min: 1, max: 16, hint: "1" },
  ]],
  ["Length and stops", [
    { name: "max_tokens", label: "Max tokens", kind: "integer", min: 1, hint: "as many as fit" },
    { name: "min_tokens", label: "Min tokens", kind: "integer", min: 0, hint: "0" },
    { name: "stop", label: "Stop strings, one per line", kind: "lines" },
    { name: "stop_token_ids", label: "Stop token ids", kind: "integers", hint: "5, 7" },
    { name: "include_stop_str_in_output", label: "Include the stop string", kind: "flag" },
    { name: "ignore_eos", label: "Ignore the end token", kind: "flag" },
    { name: "truncate_prompt_tokens", label: "Truncate the prompt to tokens", kind: "integer", min: -1 },
  ]],
  ["Repetition", [
    { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, step: 0.05 },
    { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1 },
    { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  ]],
  ["Thinking", [
    { name: "thinking", label: "Thinking", kind: "choice", options: THINKING },
    { name: "reasoning_effort", label: "Reasoning effort", kind: "choice",
      options: ["", "none", "minimal", "low", "medium", "high"].map((word) => [word, word || "default"]) },
    { name: "thinking_token_budget", label: "Max reasoning tokens", kind: "integer", min: -1 },
    { name: "include_reasoning", label: "Include the reasoning", kind: "flag" },
  ]],
  ["Response format", [
    { name: "format", label: "Format", kind: "choice", options: [["", "any text"], ["json_object", "JSON"],
      ["json_schema", "JSON with a schema"], ["regex", "regular expression"], ["choice", "one of these choices, one per line"],
      ["grammar", "grammar"]] },
    { name: "constraint", label: "Schema, regular expression, choices or grammar", kind: "text", code: true, wide: true },
  ]],
  ["Audio", [
    { name: "spoken", label: "Audio output", kind: "choice", options: [["", "no"], ["audio", "yes"]] },
    { name: "voice", label: "Voice", kind: "text", hint: "default" },
  ]],
  ["Tools", [
    { name: "tools", label: "Tools, a JSON array; with a \"url\" beside \"function\" this page can run them; {\"type\": \"mcp\", \"server_label\": ...}: the server does",
      kind: "json", code: true, wide: true, hint: '[{"type": "function", "function": {"name": "get_weather", '
        + '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}, "url": "http://localhost:9000/weather"}]' },
    { name: "tool_choice", label: "Calls", kind: "choice",
      options: [["", "model decides"], ["none", "none"], ["required", "required"]] },
    { name: "parallel_tool_calls", label: "Parallel tool calls", kind: "flag" },
    { name: "run_tools", label: "Run tools that have a URL", kind: "choice", options: [["", "after confirmation"], ["auto", "automatically"]] },
  ]],
  ["Tokens", [
    { name: "top_logprobs", label: "Top log probabilities", kind: "integer", min: 0, max: 20, hint: "no" },
    { name: "logit_bias", label: "Logit bias by token id (JSON)", kind: "json", hint: '{"42": -100}' },
    { name: "bad_words", label: "Bad words, one per line", kind: "lines" },
    { name: "allowed_token_ids", label: "Allowed token ids", kind: "integers" },
    { name: "skip_special_tokens", label: "Skip special tokens", kind: "flag" },
    { name: "spaces_between_special_tokens", label: "Spaces between special tokens", kind: "flag" },
  ]],
  ["More", [
    { name: "chat_template_kwargs", label: "Chat template variables (JSON)", kind: "json", wide: true },
    { name: "priority", label: "Priority", kind: "integer" },
    { name: "speculative", label: "Draft tokens", kind: "integer", min: 0 },
    { name: "cache_salt", label: "Cache salt", kind: "text" },
    { name: "extra", label: "Other request fields (JSON)", kind: "json", code: true, wide: true },
  ]],
];

for (const [, fields] of GROUPS)
  for (const field of fields) if (field.kind === "flag") field.options = YES_NO;

export const FIELDS = GROUPS.flatMap(([, fields]) => fields);

/** What was typed cannot be sent. */
export class Invalid extends Error {
  constructor(field, message) {
    super(`${t(field.label)}: ${message}`);
    this.field = field.name;
  }
}

/** The value of what was typed, undefined for nothing. Throws Invalid. */
export function valueOf(field, typed) {
  const text = (typed ?? "").trim();
  if (text === "") return undefined;
  switch (field.kind) {
    case "number": case "integer": return number(field, text);
    case "integers": return text.split(/[\s,]+/).filter(Boolean).map((each) => number({ ...field, kind: "integer" }, each));
    case "lines": return typed.split("\n").filter((line) => line !== "").map(unescaped);
    case "flag": return text === "true";
    case "json": return json(field, text);
    default: return text;
  }
}

function number(field, text) {
  const value = Number(text);
  if (Number.isNaN(value) || (field.kind === "integer" && !Number.isInteger(value)))
    throw new Invalid(field, t(field.kind === "integer" ? "{0} is not a whole number" : "{0} is not a number", text));
  if (value < (field.min ?? -Infinity)) throw new Invalid(field, t("at least {0}", field.min));
  if (value > (field.max ?? Infinity)) throw new Invalid(field, t("at most {0}", field.max));
  return value;
}

function json(field, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Invalid(field, t("not JSON: {0}", error.message));
  }
}

/** A line may say \n and \t. */
const unescaped = (line) => line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
