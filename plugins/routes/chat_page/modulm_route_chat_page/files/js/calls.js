// Calls of tools in an answer: what was called, and a field for what the tool gave.

import { icon, make } from "./dom.js";
import { t } from "./words.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/**
 * The calls of a node. results: text by call id of those that are answered; address(call): where a
 * tool can be run, if anywhere; act: {run(call), runOn(), give(texts), approve(yes), note(call, text)}.
 */
export function callsView(node, results, address, act) {
  const open = !results && node.state !== "running";
  const fields = new Map();
  const box = make("form", { class: "calls", "aria-label": t("Tool calls"), onsubmit: (event) => {
    event.preventDefault();
    act.give(Object.fromEntries([...fields].map(([id, field]) => [id, field.value])));
  } });
  for (const call of node.calls ?? []) box.append(callView(node, call, results?.[call.id], open, address(call), act, fields));
  // Calls of tool servers are approved together, if all are.
  const asks = (node.calls ?? []).length && node.calls.every(({ id }) => node.approvals?.[id]);
  if (open && asks) box.append(make("div", { class: "row" },
    make("button", { type: "button", class: "main approve", onclick: () => act.approve(true) }, t("Approve")),
    make("button", { type: "button", class: "decline", onclick: () => act.approve(false) }, t("Decline"))));
  else if (open) box.append(make("div", { class: "row" }, make("button", { class: "main give" }, t("Send results")),
    (node.calls ?? []).every(address) && make("button", { type: "button", class: "run-on", onclick: act.runOn }, t("Run and continue"))));
  return box;
}

/** Calls that the server made, with their results. */
export function hostedView(calls) {
  return make("div", { class: "calls hosted", role: "group", "aria-label": t("Tool server calls") }, ...calls.map((call) =>
    make("details", { class: "call" },
      make("summary", {}, `${t("Called")} `, make("b", {}, call.name), ` ${t("of {0}", call.server_label)}`, call.error !== null && ` ${t("(failed)")}`),
      make("pre", { tabIndex: 0 }, pretty(call.arguments)), make("div", { class: "faint" }, t("Result")),
      make("pre", { class: "result", tabIndex: 0 }, pretty(call.output ?? call.error ?? "")))));
}

function callView(node, call, result, open, address, act, fields) {
  const fold = make("details", { class: "call", open },
    make("summary", {}, `${t("Calls")} `, make("b", {}, call.name)), make("pre", { tabIndex: 0 }, pretty(call.arguments)));
  if (result !== undefined)
    fold.append(make("div", { class: "faint" }, t("Result")), make("pre", { class: "result", tabIndex: 0 }, pretty(result)));
  const label = node.approvals?.[call.id];
  if (label && open) fold.append(make("p", { class: "faint" }, t("The tool server {0} waits for your approval.", label)));
  if (!open || label) return fold;
  const field = make("textarea", { rows: 2, class: "result", spellcheck: "false", "aria-label": t("Result of {0}", call.name),
    placeholder: t("Result of the tool"), value: node.results?.[call.id] ?? "" });
  field.addEventListener("input", () => act.note(call, field.value));
  fields.set(call.id, field);
  fold.append(field);
  const wrong = node.wrong?.[call.id];
  if (wrong) fold.append(make("p", { class: "error", role: "alert" }, wrong));
  if (address)
    fold.append(make("button", { type: "button", class: "run", title: address, onclick: () => act.run(call) },
      icon("go"), t("Run {0}", new URL(address, location.href).host)));
  return fold;
}
