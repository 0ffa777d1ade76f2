// The server's API, as the page uses it.

import { t } from "./words.js";

/** What the server refused, or that it could not be reached (status 0). */
export class Refused extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The key is kept as long as the tab is, nowhere else. */
export const key = {
  get: () => sessionStorage.getItem("modulm.key") ?? "",
  set: (value) => sessionStorage.setItem("modulm.key", value),
};

function headers() {
  const given = key.get().trim();
  return { "Content-Type": "application/json", ...(given && { Authorization: `Bearer ${given}` }) };
}

/** The response to a request; with a body it is a POST. Throws Refused, and AbortError if stopped. */
export async function ask(path, body, signal) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, { headers: headers(), signal, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(t("the server cannot be reached"), 0);
  }
  if (response.ok) return response;
  const said = (await response.json().catch(() => ({}))).error ?? {};
  throw new Refused(said.message ?? t("the server answered {0}", response.status), response.status, said.param);
}

/** Change something on the server with PUT; `keepalive`: also while the page is being left. */
export async function put(path, body, keepalive = false) {
  const response = await fetch(path, { method: "PUT", headers: headers(), body: JSON.stringify(body), keepalive })
    .catch(() => { throw new Refused(t("the server cannot be reached"), 0); });
  if (response.ok) return;
  const said = (await response.json().catch(() => ({}))).error ?? {};
  throw new Refused(said.message ?? t("the server answered {0}", response.status), response.status, said.param);
}

/** The models that are served. */
export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** What the server says of this page: tasks of the model, attachments, origins of tools. */
export async function about() {
  return (await ask("page/about.json")).json();
}
