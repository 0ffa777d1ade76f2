// Reading answers aloud, with voices of this machine only: others would send the text elsewhere.

import { toast } from "./dom.js";
import { t } from "./words.js";

const speech = globalThis.speechSynthesis;

export const canSpeak = Boolean(speech && globalThis.SpeechSynthesisUtterance);

/** Read a text aloud, or stop if something is being read. */
export async function speak(text) {
  if (speech.speaking || speech.pending) {
    speech.cancel();
    return;
  }
  const language = document.documentElement.lang || navigator.language;
  const local = (await voices()).filter((voice) => voice.localService);
  if (!local.length) {
    toast(t("This browser has no voice of its own; others would send the text elsewhere."));
    return;
  }
  const utterance = new SpeechSynthesisUtterance(text);
  utterance.voice = local.find((voice) => voice.lang.startsWith(navigator.language))
    ?? local.find((voice) => voice.lang.startsWith(language)) ?? local[0];
  speech.speak(utterance);
}

/** The voices; some browsers know them only after a moment. */
function voices() {
  const known = speech.getVoices();
  if (known.length) return known;
  return new Promise((resolve) => {
    const later = setTimeout(() => resolve(speech.getVoices()), 1000);
    speech.addEventListener("voiceschanged", () => { clearTimeout(later); resolve(speech.getVoices()); }, { once: true });
  });
}
