// One function for each part of the page: what the server said goes in, elements go out.

import { SOURCES, bar, fillLine, key, sourcesChart, spanOf } from "./charts.js";
import { ago, byId, bytes, count, el, fill, note, percent, plural, seconds, table } from "./dom.js";

const RECENT_S = 300;
const STATES = {
  waiting: "waits for its turn", fetching: "waits for the store", loading: "is copied to the device", prompt: "computes its prompt", answering: "answers",
};

export function head(state) {
  document.title = `${state.model} · stepwell`;
  byId("model").textContent = state.model;
  const checkpoint = state.checkpoint_bytes ? `, ${bytes(state.checkpoint_bytes)} per checkpoint` : "";
  byId("about").textContent = `stepwell ${state.version} · pages of ${state.page_tokens} tokens, ${count(state.bytes_per_token)} bytes per token${checkpoint} · `
    + `up to ${count(state.max_context)} tokens a request · kernels: ${kernels(state.kernels)}`;
}

// By what runs them; what they are for only where that differs.
function kernels(chosen) {
  const by = new Map();
  for (const [what, name] of Object.entries(chosen)) by.set(name, [...(by.get(name) || []), what]);
  return [...by].map(([name, what]) => (by.size > 1 ? `${name} (${what.join(", ")})` : name)).join(", ");
}

export function figures(state, history, tree) {
  const recent = history.ago_s.map((agoS, at) => (agoS <= RECENT_S ? at : -1)).filter((at) => at >= 0);
  const sum = (column) => recent.reduce((total, at) => total + column[at], 0);
  const sources = Object.fromEntries(SOURCES.map((source) => [source, sum(history.prompt_tokens[source])]));
  const prompt = SOURCES.reduce((total, source) => total + sources[source], 0);
  const over = Math.max(Math.min(RECENT_S, history.ago_s[0] + history.every_s), history.every_s);
  const figure = (value, what) => el("div", { class: "figure" }, el("strong", null, value), el("span", null, what));
  fill("figures",
    figure(prompt ? percent(1 - sources.computed / prompt) : "–", "of prompt tokens cached, in 5 minutes"),
    figure(count(prompt / over), "prompt tokens a second"),
    figure(count(sum(history.output_tokens) / over), "answer tokens a second"),
    figure(`${count(state.requests.active)} + ${count(state.requests.waiting)}`, "requests run + wait"),
    figure(tree.tokens_per_s ? count(tree.tokens_per_s) : "–", "tokens a second, computing prompts"));
}

export function sources(history) {
  const total = SOURCES.reduce((sum, source) => sum + history.prompt_tokens[source].reduce((a, b) => a + b, 0), 0);
  if (!total) return fill("sources", note("No answer has ended in the last hour."));
  const width = Math.max(Math.min(byId("sources").clientWidth || 800, 1100), 300);
  return fill("sources", el("p", { class: "key" }, ...key(Object.fromEntries(SOURCES.map((source) => [source, source])))), sourcesChart(history, width),
    note(`Share of prompt tokens by where they came from, of answers that ended in the last ${spanOf(history) / 60} minutes; below, prompt tokens in each column.`));
}

export function tiers(state, history, store) {
  const rows = Object.entries(state.tiers).map(([tier, sizes]) => {
    const held = Math.max(sizes.size_bytes - sizes.available_bytes, 0), cached = Math.max(sizes.used_bytes - held, 0);
    const says = `${bytes(sizes.used_bytes)} of ${bytes(sizes.size_bytes)} (${percent(sizes.used_bytes / sizes.size_bytes)})`;
    const parts = [["held", held, `${bytes(held)} in use by requests, pins and copies`], [tier, cached, `${bytes(cached)} cached, could be evicted`]];
    return tierRow(tier, says, bar(parts, sizes.size_bytes, `${tier}: ${says}`), fillLine(history, tier, sizes.size_bytes));
  });
  if (store.used_bytes !== null) {
    const says = store.budget_bytes ? `${bytes(store.used_bytes)} of ${bytes(store.budget_bytes)} (${percent(store.used_bytes / store.budget_bytes)})` : bytes(store.used_bytes);
    rows.push(tierRow("store", says, store.budget_bytes ? bar([["store", store.used_bytes, says]], store.budget_bytes, `store: ${says}`) : null, null));
  }
  const marks = { held: "in use", device: "cached on the device" };
  if (state.tiers.host) marks.host = "on the host";
  if (store.budget_bytes) marks.store = "stored";
  fill("tiers", el("p", { class: "key" }, ...key(marks)), ...rows,
    note(`Copies and backups under way: ${count(state.pending)}. Checkpoints to be stored later: ${count(state.deferred)}. Lines: the last ${spanOf(history) / 60} minutes.`));
}

function tierRow(name, says, drawn, line) {
  return el("div", { class: "tier" }, el("p", null, el("strong", null, name), el("span", null, says)), drawn, line);
}

export function requests(found) {
  const rows = found.requests;
  const named = rows.some((each) => each.tenant !== null);
  const cells = (each) => [
    `#${each.id}`, ...(named ? [each.tenant || ""] : []), STATES[each.state] || each.state,
    `${count(each.ready_tokens)} of ${count(each.prompt_tokens)}`, each.cached_tokens === null ? "" : count(each.cached_tokens),
    `${count(each.answer_tokens)} of ${count(each.max_tokens)}`, seconds(each.age_s),
  ];
  const heads = ["request", ...(named ? ["tenant"] : []), "it", "prompt", "cached", "answer", "since"];
  const more = found.active + found.waiting - rows.length;
  fill("requests", rows.length ? table(heads, rows.map(cells), named ? 3 : 2) : note(more ? "" : "None."),
    more > 0 ? note(`${plural(more, "more request")}, not shown here.`) : null);
}

export function paths(tree, operates) {
  const most = Math.max(...tree.paths.map((each) => each.used_bytes.device + each.used_bytes.host), 1);
  const rows = tree.paths.map((each) => [
    el("span", { class: "inline" }, bar([["device", each.used_bytes.device, bytes(each.used_bytes.device)], ["host", each.used_bytes.host, bytes(each.used_bytes.host)]], most, "its share of the largest")),
    `${count(each.start)} – ${count(each.end)}`, each.branches ? `${count(each.branches)} branch off` : "ends", whose(each.namespace),
    bytes(each.used_bytes.device), bytes(each.used_bytes.host), count(each.checkpoints), count(each.hits), ago(each.used_ago_s), cost(each.compute_s),
  ]);
  const heads = ["", "tokens", "then", "whose", "device", "host", "checkpoints", "used", "last", "to compute again"];
  const speed = tree.tokens_per_s ? ` Costs are at ${count(tree.tokens_per_s)} tokens a second, as measured of late.` : " How fast prompts are computed is not known yet.";
  fill("paths", rows.length ? table(heads, rows, 4) : note("Nothing is cached."), rows.length ? note(
    `A row is a stretch of tokens with nothing branching off between, so bytes add up. The ${count(rows.length)} largest of ${count(tree.num_paths)}${seen(tree)}.${speed}${operates ? "" : " Without what has a salt."}`) : null);
}

export function checkpoints(tree) {
  if (!tree.needs_checkpoints) return fill("checkpoints", note("This model needs none: its pages are enough to resume from."));
  if (!tree.checkpoints.length) return fill("checkpoints", note("There are none."));
  const kinds = tree.causes.map((each) => [each.says, count(each.count), bytes(each.used_bytes.device), bytes(each.used_bytes.host)]);
  const rows = tree.checkpoints.map((each) => [
    each.says, whose(each.namespace), [each.in_use ? "in use" : "", each.to_be_stored ? "to be stored" : ""].filter(Boolean).join(", "),
    count(each.at), count(each.saves_tokens), cost(each.compute_s), bytes(each.used_bytes.device), bytes(each.used_bytes.host), count(each.uses), ago(each.used_ago_s),
  ]);
  fill("checkpoints", table(["why it was left", "checkpoints", "device", "host"], kinds),
    el("h3", null, `The ${count(rows.length)} that save most`),
    table(["why it was left", "whose", "now", "at token", "saves tokens", "to compute", "device", "host", "resumed", "last"], rows, 3),
    note(`Without a checkpoint, a request falls back to the one before it. Windows that neighbours share count for each${tree.complete ? "" : "; only the newest paths were looked at"}.`));
}

const seen = (tree) => (tree.complete ? "" : " that were looked at, which are the newest");
const cost = (amount) => (amount === null ? "–" : seconds(amount));

function whose(namespace) {
  if (namespace === null) return "?";
  const parts = [namespace.tenant, namespace.adapter ? `adapter ${namespace.adapter}` : null, namespace.salted && !namespace.tenant ? `salt ${namespace.id}` : null];
  return parts.filter(Boolean).join(", ") || "everybody";
}

export function explained(found) {
  const whole = Math.max(found.prompt_tokens, 1), known = Math.max(found.known_tokens - found.restore_tokens, 0);
  const marks = { device: "resumed from the cache", host: "known, without a point to resume from", computed: "computed" };
  const parts = [["device", found.restore_tokens, `${count(found.restore_tokens)} tokens are resumed`], ["host", known, `${count(known)} tokens are known, and computed all the same`]];
  const facts = [
    ["prompt", `${count(found.prompt_tokens)} tokens`], ["resumes at", `token ${count(found.restore_tokens)}`], ["known up to", `token ${count(found.known_tokens)}`],
    ["in the store up to", found.store_tokens === null ? null : `token ${count(found.store_tokens)}`], ["cause", `${found.cause.replaceAll("_", " ")}: ${found.reason}`],
    ["states", found.states.join(", ") || null], ["tier", found.tier], ["when", found.seconds_ago === null ? null : ago(found.seconds_ago)], ["detail", found.detail || null],
  ].filter((fact) => fact[1] !== null);
  fill("explained", el("p", { class: "says" }, found.says), el("p", { class: "key" }, ...key(marks)), bar(parts, whole, found.says),
    el("dl", null, ...facts.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)])));
}

export function pins(found, release) {
  if (found === null) return fill("pins", note("The admin token shows them."));
  const named = found.some((each) => each.tenant !== null);
  const rows = found.map((each) => [
    `#${each.id}`, ...(named ? [each.tenant || "everybody"] : []), `${count(each.pinned_tokens)} of ${count(each.prompt_tokens)}`, each.expires_in_s === null ? "for ever" : seconds(each.expires_in_s),
    el("button", { id: `release-${each.id}`, class: "screen", click: () => release(each.id) }, "Release"),
  ]);
  return fill("pins", rows.length ? table(["pin", ...(named ? ["whose"] : []), "tokens", "for", ""], rows, named ? 2 : 1) : note("None. Type a prompt above to pin what is cached of it."));
}

export function store(found, operates) {
  if (found.name === null) return fill("store", note(`None is attached. What leaves memory is gone, and a restart begins empty.`));
  const breaker = found.breaker === null ? "" : `, its breaker is ${found.breaker}`;
  const parts = [el("p", null, el("strong", null, found.name), ` ${found.says}${breaker}.`)];
  if (found.namespaces === null) parts.push(note(operates ? "This store does not say what it holds." : "The admin token shows what it holds."));
  else if (!found.namespaces.length) parts.push(note("It is empty."));
  else {
    const named = found.namespaces.some((each) => each.tenant !== null);
    const rows = found.namespaces.map((each) => [each.id, each.label, ...(named ? [each.tenant || ""] : []), count(each.values), bytes(each.used_bytes)]);
    parts.push(table(["namespace", "model", ...(named ? ["tenant"] : []), "values", "bytes"], rows, named ? 3 : 2));
  }
  return fill("store", ...parts);
}

export function tenants(state) {
  const names = Object.keys(state.tenants);
  byId("tenants-card").hidden = !names.length;
  document.querySelectorAll(".for-tenants").forEach((each) => { each.hidden = !names.length; });
  document.querySelectorAll("select.tenants").forEach((select) => {
    if (select.dataset.names === JSON.stringify(names)) return;
    const chosen = select.value;
    select.replaceChildren(el("option", { value: "" }, "–"), ...names.map((name) => el("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : "";
    select.dataset.names = JSON.stringify(names);
  });
  const tierNames = Object.keys(state.tiers);
  const cell = (sizes) => (!sizes ? "" : sizes.quota_bytes === null ? bytes(sizes.used_bytes) : `${bytes(sizes.used_bytes)} of ${bytes(sizes.quota_bytes)}`);
  fill("tenants", table(["tenant", ...tierNames], names.map((name) => [name, ...tierNames.map((tier) => cell(state.tenants[name][tier]))])));
}

export function counters(state) {
  const rows = Object.entries(state.counters).sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, amount]) => [name, count(amount)]);
  fill("counters", table(["what the cache counted since it started", ""], rows));
}
