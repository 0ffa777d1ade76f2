// Copying, also where the browser's clipboard is kept from pages without TLS.

import { announce, icon } from "./dom.js";
import { t } from "./words.js";

/** Put a text on the clipboard; whether that was possible. */
export async function copyText(text) {
  if (navigator.clipboard && isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not allowed: the other way may be.
    }
  }
  return copySelected(text);
}

function copySelected(text) {
  const active = document.activeElement;
  const area = document.createElement("textarea");
  area.className = "unseen";
  area.readOnly = true;
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  active?.focus?.();
  return done;
}

/** What a button does that copies: it says whether it did. */
export async function copyBy(button, text) {
  const done = await copyText(text);
  announce(t(done ? "Copied" : "The browser does not allow copying"));
  const before = [...button.childNodes];
  button.replaceChildren(done ? icon("done") : "✗");
  setTimeout(() => button.replaceChildren(...before), 1500);
}
