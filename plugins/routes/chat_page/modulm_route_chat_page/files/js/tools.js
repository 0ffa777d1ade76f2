// Running a tool over HTTP: the arguments as a JSON body, the answer's text as the result.

import { t } from "./words.js";

const MOST = 100_000;

/** The result of a call. Throws an Error that says what is in the way. */
export async function runTool(address, call, origins, signal) {
  const url = new URL(address, location.href);
  let response;
  try {
    response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" },
      body: call.arguments || "{}", signal, credentials: "omit", referrerPolicy: "no-referrer" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(reason(url, origins));
  }
  const text = (await response.text()).slice(0, MOST);
  return response.ok ? text : `HTTP ${response.status}: ${text}`;
}

function reason(url, origins) {
  if (url.origin === location.origin || origins.includes(url.origin))
    return t("{0} cannot be reached, or does not allow this page (CORS)", url.origin);
  return t("this page may not call {0}: start the server with --chat-page-tool-origins {0}", url.origin);
}
