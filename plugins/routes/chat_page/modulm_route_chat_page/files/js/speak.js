// Reading answers aloud: with the server's model if it speaks, or else with voices of this machine
// only, since others would send the text elsewhere.

import { ask } from "./api.js";
import { toast } from "./dom.js";
import { wavUrl } from "./sound.js";
import { t } from "./words.js";

const speech = globalThis.speechSynthesis;

/** What the server says of its voice (`about.speech`), and what it is reading now. */
let server = null, reading = null;

/** Read with the server from now on, if it speaks. */
export function useServer(facts) {
  server = facts ?? null;
}

export const canSpeak = () => Boolean(server?.reads || (speech && globalThis.SpeechSynthesisUtterance));

/** Samples per second of the server's sound. */
export const rate = () => server?.rate;

/** Read a text aloud, or stop if something is being read. */
export function speak(text, model, voice) {
  return server?.reads ? readByServer(text, model, voice) : readHere(text);
}

async function readByServer(text, model, voice) {
  const before = reading;
  reading = null;
  if (before) {
    before.stop();
    return;
  }
  const control = new AbortController(), own = { stop: () => control.abort() };
  reading = own;
  try {
    const asked = { model, input: text, response_format: "pcm", ...(voice && { voice }) };
    const response = await ask("v1/audio/speech", asked, control.signal);
    const player = new Audio(await wavUrl(new Uint8Array(await response.arrayBuffer()), server.rate));
    if (reading !== own) return;
    own.stop = () => player.pause();
    player.addEventListener("ended", () => { if (reading === own) reading = null; });
    await player.play();
  } catch (error) {
    if (reading === own) reading = null;
    if (error.name !== "AbortError") toast(error.message);
  }
}

async function readHere(text) {
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
