// Asks the server every few seconds, and says so when it does not answer. The token is kept by this tab alone.

import { patterns } from "./charts.js";
import { byId, count, el, fill } from "./dom.js";
import * as panels from "./panels.js";

const EVERY_MS = 5000;
const PATIENCE_MS = 15000;
const TOKEN = "stepwell-token";
const NOT_ADMIN = "This is not the admin token: pins, flushes and what has a salt are not for it.";

let token = remembered();
let operates = false;
let shown = null; // what was drawn last, to draw it again when the page changes its width
let timer = 0;
let turn = 0; // of asking: an answer to an earlier one is dropped, for the token may be another by now

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// ---- asking -------------------------------------------------------------------------------------

async function ask(path, { method = "GET", body } = {}) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(token))}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const reply = await fetch(path, { method, headers, body: sent, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  const answer = await reply.json().catch(() => null);
  if (reply.ok && answer !== null) return answer;
  throw new Refused(reply.status, answer?.error?.message || `the server answered with status ${reply.status}`);
}

async function look() {
  const state = await ask("cache"); // first and alone: whoever may not see it causes one error, not six
  const pins = state.admin ? ask("cache/pins").then((found) => found.pins) : null;
  const others = ["cache/history", "cache/requests", "cache/tree", "cache/store"].map((path) => ask(path));
  const [history, requests, tree, store, pinned] = await Promise.all([...others, pins]);
  return { state, history, requests, tree, store, pins: pinned };
}

async function refresh() {
  clearTimeout(timer);
  const mine = (turn += 1);
  if (document.hidden) return;
  try {
    const seen = await look();
    if (mine !== turn) return;
    shown = seen;
    operates = seen.state.admin;
    draw();
    const { active, waiting } = seen.state.requests;
    say("ok", `${count(active)} running, ${count(waiting)} waiting · ${new Date().toLocaleTimeString()}`);
    timer = setTimeout(refresh, EVERY_MS);
  } catch (error) {
    if (mine === turn) failed(error);
  }
}

function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    shown = null;
    byId("main").hidden = true;
    say("refused", token ? "This token does not open this page: type the admin token below."
      : "This server wants its admin token, or its API key: type it below.");
    tokenNote();
    return; // until somebody types another
  }
  say("stale", `${reason(error)} Trying again every ${EVERY_MS / 1000} seconds${shown ? "; what is below is old" : ""}.`);
  timer = setTimeout(refresh, EVERY_MS);
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

function say(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  status.textContent = text;
  document.body.classList.toggle("stale", state === "stale");
}

// ---- showing ------------------------------------------------------------------------------------

function draw() {
  const { state, history, requests, tree, store, pins } = shown;
  byId("main").hidden = false;
  panels.head(state);
  panels.figures(state, history, tree);
  panels.sources(history);
  panels.tiers(state, history, store);
  panels.requests(requests);
  panels.paths(tree, operates);
  panels.checkpoints(tree);
  panels.pins(pins, release);
  panels.store(store, operates);
  panels.tenants(state);
  panels.counters(state);
  document.querySelectorAll(".for-admin").forEach((each) => { each.disabled = !operates; });
  tokenNote();
}

function tokenNote() {
  byId("forget").hidden = !token;
  byId("token-form").dataset.state = operates && shown ? "admin" : token ? "other" : "none";
  let says = "Kept in this tab until it is closed. Needed to pin, to flush, and to see what has a salt.";
  if (token && !shown) says = "Not tried yet, or refused.";
  else if (token) says = operates ? "The admin token is used. It is kept in this tab until it is closed." : NOT_ADMIN;
  byId("token-note").textContent = says;
}

// ---- doing --------------------------------------------------------------------------------------

function prompt() {
  const text = byId("prompt").value;
  const body = byId("as-chat").checked ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  return { ...body, ...owner("salt", "prompt-tenant") };
}

function owner(salt, tenant) {
  const made = {};
  if (byId(salt).value) made.cache_salt = byId(salt).value;
  if (byId(tenant).value) made.tenant = byId(tenant).value;
  return made;
}

const reason = (error) => (error instanceof Refused ? sentence(error.message) : "The server does not answer.");
const problem = (error) => el("p", { class: "problem" }, reason(error));

async function explain(event) {
  event.preventDefault();
  try {
    panels.explained(await ask("cache/explain", { method: "POST", body: prompt() }));
  } catch (error) {
    fill("explained", problem(error));
  }
}

async function pin() {
  const ttl = Number(byId("ttl").value);
  try {
    const made = await ask("cache/pins", { method: "POST", body: { ...prompt(), ...(ttl > 0 ? { ttl_s: ttl } : {}) } });
    const pinned = `Pinned ${count(made.pinned_tokens)} of ${count(made.prompt_tokens)} tokens, as pin #${made.id}.`;
    fill("explained", el("p", { class: "says" }, made.id === null ? "Nothing of it is cached, so nothing was pinned." : pinned));
    await refresh();
  } catch (error) {
    fill("explained", problem(error));
  }
}

async function release(number) {
  try {
    await ask(`cache/pins/${number}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) fill("explained", problem(error)); // else it ran out
  }
  await refresh();
}

function armed(really) {
  const { cache_salt: salt, tenant } = owner("flush-salt", "flush-tenant");
  const what = [salt && "this salt", tenant && `tenant ${tenant}`].filter(Boolean).join(" of ") || "everything";
  byId("flush").dataset.armed = really ? "yes" : "";
  byId("flush").textContent = really ? `Really flush ${what}` : "Flush";
  byId("keep").hidden = !really;
}

async function flush(event) {
  event.preventDefault();
  byId("flushed").textContent = "";
  if (!byId("flush").dataset.armed) return armed(true);
  armed(false);
  try {
    const done = await ask("cache/flush", { method: "POST", body: owner("flush-salt", "flush-tenant") });
    byId("flushed").textContent = `Flushed: ${done.flushed}. ${count(done.released_pins)} pins were released.`;
    await refresh();
  } catch (error) {
    byId("flushed").replaceChildren(problem(error));
  }
}

// ---- the token ----------------------------------------------------------------------------------

function remembered() {
  try {
    return sessionStorage.getItem(TOKEN) || "";
  } catch {
    return ""; // a browser that keeps nothing
  }
}

function use(typed) {
  token = typed.trim();
  operates = false;
  try {
    if (token) sessionStorage.setItem(TOKEN, token);
    else sessionStorage.removeItem(TOKEN);
  } catch {
    // it lasts as long as the page
  }
  byId("token").value = "";
  tokenNote();
  refresh();
}

function given(event) {
  event.preventDefault();
  if (byId("token").value.trim()) use(byId("token").value);
}

function forget() {
  shown = null;
  byId("main").hidden = true;
  fill("explained");
  for (const form of ["prompt-form", "flush-form"]) byId(form).reset(); // prompts and salts are nobody else's either
  armed(false);
  use("");
}

// ---- beginning ----------------------------------------------------------------------------------

document.body.prepend(patterns());
tokenNote();
byId("token-form").addEventListener("submit", given);
byId("forget").addEventListener("click", forget);
byId("prompt-form").addEventListener("submit", explain);
byId("pin").addEventListener("click", pin);
byId("flush-form").addEventListener("submit", flush);
byId("flush-form").addEventListener("input", () => armed(false));
byId("keep").addEventListener("click", () => armed(false));
document.addEventListener("visibilitychange", refresh);
new ResizeObserver(() => { if (shown) panels.sources(shown.history); }).observe(byId("main"));
refresh();
