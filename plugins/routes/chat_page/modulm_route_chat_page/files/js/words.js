// The page in the reader's language. The sources are in English; a text that a language lacks is
// shown as it is written there.

import { shared } from "./store.js";

/** The languages by their tags, in their own words. Each but English has a file in `languages/`. */
export const LANGUAGES = { en: "English", de: "Deutsch", fr: "Français" };

/** What is shown: the language chosen in the settings, else the first of the browser's that is known. */
export const language = [shared.get("language", ""), ...navigator.languages]
  .map((tag) => tag.split("-")[0]).find((tag) => tag in LANGUAGES) ?? "en";

const table = language === "en" ? {} : (await import(`../languages/${language}.js`)).default;

/** A text in the reader's language, with `values` in place of {0}, {1} and so on. */
export function t(text, ...values) {
  return (table[text] ?? text).replace(/\{(\d)\}/g, (_, place) => String(values[place]));
}

const ATTRIBUTES = ["aria-label", "title", "placeholder"];

/** Translate what the page's file contains. */
export function translatePage() {
  document.documentElement.lang = language;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { currentNode: node } = walker, text = node.data.trim();
    if (text in table) node.data = node.data.replace(text, () => table[text]);
  }
  for (const name of ATTRIBUTES)
    for (const node of document.querySelectorAll(`[${name}]`)) node.setAttribute(name, t(node.getAttribute(name)));
}
