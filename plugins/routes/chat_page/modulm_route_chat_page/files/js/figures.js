// What an answer took, as numbers of the server and clocks of this page.

import { language, t } from "./words.js";

/** Figures of a new answer. seconds: from the first token to the last; waited: until the first. */
export const noFigures = () => ({ prompt: 0, cached: null, generated: 0, reasoning: null, accepted: null, drafts: null, waited: null, seconds: 0, steps: 0 });

/** Take over what a chunk's usage tells. before: tokens of the answer that this one goes on with. */
export function takeUsage(figures, usage, before = 0) {
  figures.prompt = usage.prompt_tokens;
  figures.generated = before + usage.completion_tokens;
  figures.cached = usage.prompt_tokens_details?.cached_tokens ?? figures.cached;
  figures.reasoning = usage.completion_tokens_details?.reasoning_tokens ?? figures.reasoning;
  figures.accepted = usage.completion_tokens_details?.accepted_prediction_tokens ?? figures.accepted;
}

/** Below this time (s) a rate says more about the network than about the model. */
const LEAST_TIME = 0.05;

/** Take over what became of drafted tokens. */
export function takeDrafts(figures, metrics) {
  if (!metrics.num_spec_steps) return;
  figures.accepted = metrics.num_accepted_draft_tokens;
  figures.drafts = { right: metrics.draft_acceptance_rate, length: metrics.mean_acceptance_length };
}

/** Tokens per second after the first, or null where there is nothing to measure. */
export function rate(figures) {
  return figures.steps > 0 && figures.seconds > LEAST_TIME ? figures.steps / figures.seconds : null;
}

/** Prompt tokens per second until the first token, those of the cache not counted. */
export function promptRate(figures) {
  const computed = figures.prompt - (figures.cached ?? 0);
  return figures.waited > 0 && computed > 0 ? computed / figures.waited : null;
}

const whole = new Intl.NumberFormat(language, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(language, { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const speed = (value) => t("{0} tokens/s", (value < 100 ? tenth : whole).format(value));
const some = (count) => t(count === 1 ? "{0} token" : "{0} tokens", whole.format(count));

export const duration = (seconds) => (seconds < 10 ? `${seconds.toFixed(1)} s` : seconds < 90
  ? `${Math.round(seconds)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`);

/** One line for people. */
export function described(figures) {
  if (!figures) return "";
  const parts = [];
  if (figures.prompt) {
    const cached = figures.cached ? ` ${t("({0} cached)", whole.format(figures.cached))}` : "";
    const fast = promptRate(figures);
    parts.push(t("prompt {0}", `${some(figures.prompt)}${cached}${fast ? `, ${speed(fast)}` : ""}`));
  }
  const fast = rate(figures);
  const thoughts = figures.reasoning ? ` ${t("({0} reasoning)", whole.format(figures.reasoning))}` : "";
  parts.push(t("answer {0}", `${some(figures.generated)}${thoughts}${fast ? `, ${speed(fast)}` : ""}`));
  if (figures.accepted !== null && figures.accepted !== undefined) {
    const share = figures.drafts ? ` ${t("({0} %, {1} tokens per step)", whole.format(100 * figures.drafts.right), tenth.format(figures.drafts.length))}` : "";
    parts.push(`${t("{0} drafts accepted", whole.format(figures.accepted))}${share}`);
  }
  if (figures.waited !== null) parts.push(t("first token after {0} s", figures.waited.toFixed(2)));
  return parts.join(" · ");
}
