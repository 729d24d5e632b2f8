// One function for each part of the page: what the server said goes in, elements go out.

import { SOURCES, bar, fillLine, key, sourcesChart, spanOf } from "./charts.js";
import { ago, byId, bytes, count, el, fill, note, percent, plural, seconds, table } from "./dom.js";

const RECENT_S = 300;
const STATES = {
  waiting: "waits for its turn",
  fetching: "waits for the store",
  loading: "is copied to the device",
  prompt: "computes its prompt",
  answering: "answers",
};

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

// ---- the server -----------------------------------------------------------------------------------

export function head(state) {
  document.title = `${state.model} · stepwell`;
  byId("model").textContent = state.model;
  byId("about").textContent = [
    `stepwell ${state.version}`,
    `pages of ${state.page_tokens} tokens`,
    `${count(state.bytes_per_token)} bytes per token`,
    state.checkpoint_bytes ? `${bytes(state.checkpoint_bytes)} per checkpoint` : null,
    `up to ${count(state.max_context)} tokens a request`,
    `kernels: ${kernels(state.kernels)}`,
  ].filter(Boolean).join(" · ");
}

// By what runs them; what they are for only where that differs.
function kernels(chosen) {
  const by = new Map();
  for (const [what, name] of Object.entries(chosen)) by.set(name, [...(by.get(name) || []), what]);
  return [...by].map(([name, what]) => (by.size > 1 ? `${name} (${what.join(", ")})` : name)).join(", ");
}

export function figures(state, history, tree) {
  const recent = (column) => sum(column.filter((_, at) => history.ago_s[at] <= RECENT_S));
  const computed = recent(history.prompt_tokens.computed);
  const prompt = sum(SOURCES.map((source) => recent(history.prompt_tokens[source])));
  const over = Math.max(Math.min(RECENT_S, history.ago_s[0] + history.every_s), history.every_s);
  const figure = (value, what) => el("div", { class: "figure" }, el("strong", null, value), el("span", null, what));
  fill("figures",
    figure(prompt ? percent(1 - computed / prompt) : "–", "of prompt tokens cached, in 5 minutes"),
    figure(count(prompt / over), "prompt tokens a second"),
    figure(count(recent(history.output_tokens) / over), "answer tokens a second"),
    figure(`${count(state.requests.active)} + ${count(state.requests.waiting)}`, "requests run + wait"),
    figure(tree.tokens_per_s ? count(tree.tokens_per_s) : "–", "tokens a second, computing prompts"));
}

export function sources(history) {
  if (!sum(SOURCES.map((source) => sum(history.prompt_tokens[source])))) {
    return fill("sources", note("No answer has ended in the last hour."));
  }
  const width = Math.max(Math.min(byId("sources").clientWidth || 800, 1100), 300);
  const names = Object.fromEntries(SOURCES.map((source) => [source, source]));
  return fill("sources", el("p", { class: "key" }, ...key(names)), sourcesChart(history, width), note(
    `Share of prompt tokens by where they came from, over the last ${spanOf(history) / 60} minutes; `
    + "below, prompt tokens in each column."));
}

export function requests(found) {
  const rows = found.requests, more = found.active + found.waiting - rows.length;
  const named = rows.some((each) => each.tenant !== null);
  const heads = ["request", ...(named ? ["tenant"] : []), "it", "prompt", "cached", "answer", "since"];
  const cells = (each) => [
    `#${each.id}`,
    ...(named ? [each.tenant || ""] : []),
    STATES[each.state] || each.state,
    (each.ready_tokens < each.prompt_tokens ? `${count(each.ready_tokens)} of ` : "") + count(each.prompt_tokens),
    each.cached_tokens === null ? "" : count(each.cached_tokens),
    `${count(each.answer_tokens)} of ${count(each.max_tokens)}`,
    seconds(each.age_s),
  ];
  fill("requests",
    rows.length ? table(heads, rows.map(cells), named ? 3 : 2) : null,
    more > 0 ? note(`${plural(more, "more request")}, not shown here.`) : rows.length ? null : note("None."));
}

// ---- memory ---------------------------------------------------------------------------------------

const filled = (used, whole) => (whole ? `${bytes(used)} of ${bytes(whole)} (${percent(used / whole)})` : bytes(used));

function tierRow(name, says, ...drawn) {
  return el("div", { class: "tier" }, el("p", null, el("strong", null, name), el("span", null, says)), ...drawn);
}

export function tiers(state, history, store) {
  const rows = Object.entries(state.tiers).map(([tier, sizes]) => {
    const whole = sizes.size_bytes, says = filled(sizes.used_bytes, whole);
    const held = Math.max(whole - sizes.available_bytes, 0), cached = Math.max(sizes.used_bytes - held, 0);
    const parts = [
      ["held", held, `${bytes(held)} in use by requests, pins and copies`],
      [tier, cached, `${bytes(cached)} cached, could be evicted`],
    ];
    return tierRow(tier, says, bar(parts, whole, `${tier}: ${says}`), fillLine(history, tier, whole));
  });
  const { used_bytes: used, budget_bytes: budget } = store;
  if (used !== null) {
    const says = filled(used, budget) + (store.disk_full ? "; its disk is full" : "");
    rows.push(tierRow("store", says, budget ? bar([["store", used, says]], budget, `store: ${says}`) : null));
  }
  const marks = { held: "in use", device: "cached on the device" };
  if (state.tiers.host) marks.host = "on the host";
  if (budget) marks.store = "stored";
  fill("tiers", el("p", { class: "key" }, ...key(marks)), ...rows, note(
    `Copies and backups under way: ${count(state.pending)}. Checkpoints to be stored later: ${count(state.deferred)}. `
    + `Lines: the last ${spanOf(history) / 60} minutes.`));
}

const perTier = (used) => ["device", "host"].map((tier) => (used[tier] ? bytes(used[tier]) : "–"));
const cost = (amount) => (amount === null ? "–" : seconds(amount));

function whose(namespace) {
  if (namespace === null) return "?";
  const { tenant, adapter, salted, id } = namespace;
  const parts = [tenant, adapter ? `adapter ${adapter}` : null, salted && !tenant ? `salt ${id}` : null];
  return parts.filter(Boolean).join(", ") || "everybody";
}

const areNamed = (found) => found.some((each) => whose(each.namespace) !== "everybody");

export function paths(tree, operates) {
  if (!tree.paths.length) return fill("paths", note(operates ? "Nothing is cached." : "Nothing is cached without a salt."));
  const named = areNamed(tree.paths);
  const most = Math.max(...tree.paths.map((each) => each.used_bytes.device + each.used_bytes.host), 1);
  const share = (used) => bar([["device", used.device, "on the device"], ["host", used.host, "on the host"]], most, "its size");
  const rows = tree.paths.map((each) => [
    el("span", { class: "inline" }, share(each.used_bytes)),
    `${count(each.start)} – ${count(each.end)}`,
    each.branches ? `${count(each.branches)} branch off` : "ends",
    ...(named ? [whose(each.namespace)] : []),
    ...perTier(each.used_bytes),
    count(each.checkpoints),
    count(each.hits),
    ago(each.used_ago_s),
    cost(each.compute_s),
  ]);
  const figures = ["device", "host", "checkpoints", "used", "last", "to compute again"];
  const heads = ["", "tokens", "then", ...(named ? ["whose"] : []), ...figures];
  const speed = tree.tokens_per_s ? `Costs are at ${count(tree.tokens_per_s)} tokens a second, as measured of late.`
    : "How fast prompts are computed is not known yet.";
  return fill("paths", table(heads, rows, named ? 4 : 3), note([
    "A row is a stretch of tokens with nothing branching off between, so bytes add up.",
    `The ${count(rows.length)} largest of ${count(tree.num_paths)}${tree.complete ? "." : " that were looked at, the newest."}`,
    speed,
    operates ? "" : "Without what has a salt.",
  ].join(" ")));
}

export function checkpoints(tree) {
  if (!tree.needs_checkpoints) return fill("checkpoints", note("This model needs none: its pages are enough to resume from."));
  if (!tree.checkpoints.length) return fill("checkpoints", note("There are none."));
  const kinds = tree.triggers.map((each) => [each.says, count(each.count), ...perTier(each.used_bytes)]);
  const busy = (each) => [each.in_use ? "in use" : "", each.to_be_stored ? "to be stored" : ""].filter(Boolean).join(", ");
  const noted = tree.checkpoints.some(busy), named = areNamed(tree.checkpoints);
  const rows = tree.checkpoints.map((each) => [
    each.says,
    ...(named ? [whose(each.namespace)] : []),
    ...(noted ? [busy(each)] : []),
    count(each.at),
    count(each.saves_tokens),
    cost(each.compute_s),
    ...perTier(each.used_bytes),
    count(each.uses),
    ago(each.used_ago_s),
  ]);
  const why = "why it was left";
  const figures = ["at token", "saves tokens", "to compute", "device", "host", "resumed", "last"];
  const heads = [why, ...(named ? ["whose"] : []), ...(noted ? ["now"] : []), ...figures];
  return fill("checkpoints",
    table([why, "checkpoints", "device", "host"], kinds),
    el("h3", null, `The ${count(rows.length)} that save most`),
    table(heads, rows, 1 + named + noted),
    note("Without a checkpoint, a request falls back to the one before it. Windows that neighbours share count for each"
      + `${tree.complete ? "." : "; only the newest paths were looked at."}`));
}

// ---- what can be asked and done -------------------------------------------------------------------

export function explained(found) {
  const resumed = found.restore_tokens, known = Math.max(found.known_tokens - resumed, 0);
  const marks = { device: "resumed from the cache", host: "known, without a point to resume from", computed: "computed" };
  const parts = [
    ["device", resumed, `${count(resumed)} tokens are resumed`],
    ["host", known, `${count(known)} tokens are known, and computed all the same`],
  ];
  const facts = [
    ["prompt", `${count(found.prompt_tokens)} tokens`],
    ["resumes at", `token ${count(resumed)}`],
    ["known up to", `token ${count(found.known_tokens)}`],
    ["in the store up to", found.store_tokens === null ? null : `token ${count(found.store_tokens)}`],
    ["cause", `${found.cause.replaceAll("_", " ")}: ${found.reason}`],
    ["states", found.states.join(", ") || null],
    ["tier", found.tier],
    ["when", found.seconds_ago === null ? null : ago(found.seconds_ago)],
    ["detail", found.detail || null],
  ].filter((fact) => fact[1] !== null);
  fill("explained",
    el("p", { class: "says" }, found.says),
    el("p", { class: "key" }, ...key(marks)),
    bar(parts, Math.max(found.prompt_tokens, 1), found.says),
    el("dl", null, ...facts.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)])));
}

export function pins(found, release) {
  if (found === null) return fill("pins", note("The admin token shows them."));
  if (!found.length) return fill("pins", note("None. Type a prompt above to pin what is cached of it."));
  const named = found.some((each) => each.tenant !== null);
  const rows = found.map((each) => [
    `#${each.id}`,
    ...(named ? [each.tenant || "everybody"] : []),
    `${count(each.pinned_tokens)} of ${count(each.prompt_tokens)}`,
    each.expires_in_s === null ? "for ever" : seconds(each.expires_in_s),
    el("button", { id: `release-${each.id}`, class: "screen", click: () => release(each.id) }, "Release"),
  ]);
  return fill("pins", table(["pin", ...(named ? ["whose"] : []), "tokens", "for", ""], rows, named ? 2 : 1));
}

export function store(found, operates) {
  if (found.name === null) {
    return fill("store", note("None is attached. What leaves memory is gone, and a restart begins empty."));
  }
  const breaker = found.breaker === null ? "" : `, its breaker is ${found.breaker}`;
  const title = el("p", null, el("strong", null, found.name), ` ${found.says}${breaker}.`);
  return fill("store", title, held(found.namespaces, operates));
}

function held(namespaces, operates) {
  if (namespaces === null && !operates) return note("The admin token shows what it holds.");
  if (namespaces === null) return note("This store does not say what it holds.");
  if (!namespaces.length) return note("It is empty.");
  const named = namespaces.some((each) => each.tenant !== null);
  const rows = namespaces.map((each) => [
    each.id, each.label, ...(named ? [each.tenant || ""] : []), count(each.values), bytes(each.used_bytes),
  ]);
  return table(["namespace", "model", ...(named ? ["tenant"] : []), "values", "bytes"], rows, named ? 3 : 2);
}

export function tenants(state) {
  const names = Object.keys(state.tenants), tierNames = Object.keys(state.tiers);
  byId("tenants-card").hidden = !names.length;
  for (const each of document.querySelectorAll(".for-tenants")) each.hidden = !names.length;
  for (const select of document.querySelectorAll("select.tenants")) offer(select, names);
  const cell = (sizes) => {
    if (!sizes) return "";
    return sizes.quota_bytes === null ? bytes(sizes.used_bytes) : `${bytes(sizes.used_bytes)} of ${bytes(sizes.quota_bytes)}`;
  };
  const rows = names.map((name) => [name, ...tierNames.map((tier) => cell(state.tenants[name][tier]))]);
  fill("tenants", table(["tenant", ...tierNames], rows));
}

// What is chosen stays so: the list is made anew only when there are others to choose from.
function offer(select, names) {
  const listed = JSON.stringify(names), chosen = select.value;
  if (select.dataset.names === listed) return;
  select.replaceChildren(el("option", { value: "" }, "–"), ...names.map((name) => el("option", { value: name }, name)));
  select.value = names.includes(chosen) ? chosen : "";
  select.dataset.names = listed;
}

export function counters(state) {
  const rows = Object.entries(state.counters).sort(([one], [other]) => (one < other ? -1 : 1));
  fill("counters", table(["what the cache counted since it started", ""], rows.map(([name, amount]) => [name, name.endsWith("_bytes") ? bytes(amount) : count(amount)])));
}
