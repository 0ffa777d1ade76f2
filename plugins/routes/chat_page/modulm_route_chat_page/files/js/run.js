// One answer that is being given: from the request to the nodes of a conversation. It belongs to that
// conversation, whichever one is on the screen.

import { ask } from "./api.js";
import { noFigures, takeDrafts, takeUsage } from "./figures.js";
import { joined, wavUrl } from "./sound.js";
import { rate } from "./speak.js";
import { events } from "./sse.js";

export class Run {
  /** nodes: one per choice; body(signal): makes the request; changed(node): called when a node has changed. */
  constructor(nodes, body, changed) {
    this.nodes = nodes;
    this.body = body;
    this.changed = changed;
    this.control = new AbortController();
    this.clocks = nodes.map(() => ({ first: null, last: null }));
    this.before = nodes.map((node) => node.figures?.generated ?? 0);
    this.ended = new Set();
    this.sound = [];
  }

  stop() {
    this.control.abort();
  }

  /** Until the answer is there, stopped or failed; the nodes say which. Never throws. */
  async done() {
    this.began = performance.now();
    this.nodes.forEach((node) => this.open(node));
    try {
      const { signal } = this.control;
      const response = await ask("v1/chat/completions", await this.body(signal), signal);
      for await (const chunk of events(response)) this.take(chunk);
      await this.keepSound();
      this.end("done");
    } catch (error) {
      await this.keepSound();
      if (error.name === "AbortError") this.end("stopped");
      else this.end("failed", error);
    }
    return this;
  }

  /** Make a file of the sound of the only answer. */
  async keepSound() {
    const pieces = this.sound.splice(0);
    if (pieces.length) this.nodes[0].sound = await wavUrl(joined(pieces), rate());
  }

  open(node) {
    node.state = "running";
    node.figures ??= noFigures();
    delete node.error;
    delete node.finish;
    this.changed(node);
  }

  take(chunk) {
    if (chunk.error) throw Object.assign(new Error(chunk.error.message), { status: chunk.error.code });
    for (const choice of chunk.choices) {
      const node = this.nodes[choice.index];
      if (!node) continue;
      if (chunk.usage) takeUsage(node.figures, chunk.usage, this.before[choice.index]);
      this.delta(node, choice, this.clocks[choice.index]);
    }
    if (chunk.usage && !chunk.choices.length && this.nodes.length === 1)
      takeUsage(this.nodes[0].figures, chunk.usage, this.before[0]);
    if (chunk.metrics?.speculative_decoding) takeDrafts(this.nodes[0].figures, chunk.metrics.speculative_decoding);
  }

  /** The first chunk of a choice comes with its first token, so its time is that token's. */
  delta(node, choice, clock) {
    const now = performance.now(), { delta } = choice;
    if (clock.first === null) {
      clock.first = now;
      clock.seconds = node.figures.seconds;
      clock.steps = node.figures.steps;
      node.figures.waited ??= (now - this.began) / 1000;
    }
    clock.last = now;
    node.figures.seconds = clock.seconds + (now - clock.first) / 1000;
    const index = this.nodes.indexOf(node);
    node.figures.steps = clock.steps + Math.max(0, node.figures.generated - this.before[index] - 1);
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) {
      clock.thinking ??= clock.first;
      node.reasoning = (node.reasoning ?? "") + thought;
      node.thought = (now - clock.thinking) / 1000;
    }
    if (delta.content) node.content += delta.content;
    if (delta.audio?.transcript) node.content += delta.audio.transcript;
    if (delta.audio?.data) this.sound.push(delta.audio.data);
    for (const part of delta.tool_calls ?? []) takeCall(node, part);
    for (const call of delta.mcp_calls ?? []) (node.hosted ??= []).push(call);
    for (const { id, server_label } of delta.mcp_approval_requests ?? []) (node.approvals ??= {})[id] = server_label;
    if (choice.logprobs?.content) (node.logprobs ??= []).push(...choice.logprobs.content.map(shortened));
    if (choice.finish_reason) node.finish = choice.finish_reason;
    this.changed(node);
  }

  end(state, error) {
    for (const node of this.nodes) {
      node.state = state;
      if (error) node.error = { message: error.message, status: error.status };
      this.changed(node);
    }
  }
}

function takeCall(node, part) {
  node.calls ??= [];
  const call = (node.calls[part.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= part.id ?? "";
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

/** What is kept of a token's probabilities. */
const shortened = ({ token, logprob, top_logprobs: others }) => ({
  token, logprob, others: (others ?? []).map((other) => [other.token, other.logprob]),
});
