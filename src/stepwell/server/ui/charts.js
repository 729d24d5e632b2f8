// Drawings of what came from where, and of how full memory is. SVG, so that they print; the parts differ on grey paper too.

import { bytes, count, el, percent, svg } from "./dom.js";

export const SOURCES = ["device", "host", "store", "computed"];
const FILLS = { device: "var(--device)", host: "var(--host)", store: "url(#hatched)", computed: "none", held: "var(--bar)" };
const NUM_BINS = 30;
const SPANS_S = [300, 900, 3600];
const MARKS_S = { 300: 60, 900: 180, 3600: 600 }; // between times that are written down

const look = (name) => ({ fill: FILLS[name], stroke: "var(--ink)", "stroke-width": 0.6 });

// What parts are filled with: once a page, before anything that is drawn.
export function patterns() {
  const stripe = svg("path", { d: "M1 0V6", stroke: "var(--hatch)", "stroke-width": 2 });
  const ground = svg("rect", { width: 6, height: 6, fill: "var(--store)" });
  const shape = { id: "hatched", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const defined = svg("defs", null, svg("pattern", shape, ground, stripe));
  return svg("svg", { width: 0, height: 0, class: "unseen", "aria-hidden": "true" }, defined);
}

export function key(names) {
  return Object.entries(names).map(([name, says]) => {
    const swatch = svg("rect", { x: 0.5, y: 0.5, width: 14, height: 12, ...look(name) });
    return el("span", null, svg("svg", { width: 15, height: 13, "aria-hidden": "true" }, swatch), ` ${says}`);
  });
}

// One bar, cut into parts of [look, amount, what it is]; what is left of `whole` stays empty.
export function bar(parts, whole, label) {
  let at = 0;
  const pieces = parts.filter((part) => part[1] > 0).map(([name, amount, says]) => {
    const wide = (100 * amount) / whole, x = at;
    at += wide;
    return svg("rect", { x: `${x}%`, y: 1, width: `${wide}%`, height: 14, ...look(name) }, svg("title", null, says));
  });
  const frame = svg("rect", { x: 0, y: 1, width: "100%", height: 14, fill: "none", stroke: "var(--soft)", "stroke-width": 1 });
  return svg("svg", { class: "bar", width: "100%", height: 16, role: "img", "aria-label": label }, ...pieces, frame);
}

// ---- over time ------------------------------------------------------------------------------------

export function spanOf(history) {
  const oldest = history.ago_s.length ? history.ago_s[0] : 0;
  return SPANS_S.find((span) => oldest <= span) || SPANS_S[SPANS_S.length - 1];
}

// Sums of samples by equal parts of the clock's time, so that a sample stays in its part as time goes on.
function binned(history, span, nowMs) {
  const width = span / NUM_BINS, first = Math.floor(nowMs / 1000 / width) - NUM_BINS + 1;
  const empty = { total: 0, device: 0, host: 0, store: 0, computed: 0 };
  const bins = Array.from({ length: NUM_BINS }, (_, at) => ({ at: (first + at) * width, ...empty }));
  history.ago_s.forEach((agoS, at) => {
    const bin = bins[Math.floor((nowMs / 1000 - agoS) / width) - first];
    if (!bin) return;
    for (const source of SOURCES) {
      bin[source] += history.prompt_tokens[source][at];
      bin.total += history.prompt_tokens[source][at];
    }
  });
  return { bins, width };
}

const HOURS = { hour: "2-digit", minute: "2-digit", hour12: false };
const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString([], HOURS);

// Shares of prompts by source as stacked columns, and beneath them how many tokens there were.
export function sourcesChart(history, width) {
  const left = 42, right = 4, top = 6, tall = 130, gap = 16, low = 30, bottom = 20;
  const span = spanOf(history), nowMs = Date.now();
  const { bins, width: seconds } = binned(history, span, nowMs);
  const step = (width - left - right) / NUM_BINS, floor = top + tall, base = floor + gap + low;
  const most = Math.max(...bins.map((bin) => bin.total), 1), height = base + bottom;
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const y = floor - share * tall;
    parts.push(svg("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: "var(--line)" }));
    parts.push(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, `${share * 100}%`));
  }
  parts.push(svg("line", { x1: left, x2: width - right, y1: base, y2: base, stroke: "var(--line)" }));
  parts.push(svg("text", { x: left - 6, y: base - low + 12, "text-anchor": "end" }, short(most)));
  bins.forEach((bin, at) => {
    const x = left + at * step, wide = Math.max(step - 1.5, 1);
    if (bin.at % MARKS_S[span] === 0) {
      parts.push(svg("line", { x1: x, x2: x, y1: base, y2: base + 4, stroke: "var(--soft)" }));
      parts.push(svg("text", { x, y: height - 4, "text-anchor": at < NUM_BINS - 2 ? "middle" : "end" }, clock(bin.at)));
    }
    if (!bin.total) return;
    const says = SOURCES.map((source) => `${source} ${percent(bin[source] / bin.total)}`).join(", ");
    const title = `${clock(bin.at)}, ${seconds} s: ${count(bin.total)} prompt tokens; ${says}`;
    const group = svg("g", null, svg("title", null, title));
    let y = floor;
    for (const source of SOURCES) {
      const tallness = (tall * bin[source]) / bin.total;
      y -= tallness;
      if (tallness) group.append(svg("rect", { x, y, width: wide, height: tallness, ...look(source) }));
    }
    const volume = (low * bin.total) / most;
    group.append(svg("rect", { x, y: base - volume, width: wide, height: volume, fill: "var(--bar)" }));
    parts.push(group);
  });
  const label = `Shares of prompt tokens by source, of the last ${span / 60} minutes; below, how many tokens there were`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": label }, ...parts);
}

function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  return number >= 1e4 ? `${Math.round(number / 1e3)}k` : count(number);
}

// How full a tier was: a line from left to right, as high as it was full.
export function fillLine(history, tier, sizeBytes) {
  const span = spanOf(history), used = history.used_bytes[tier] || [];
  const points = used.map((size, at) => [100 - (100 * history.ago_s[at]) / span, 30 - (30 * size) / sizeBytes]);
  const seen = points.filter(([x]) => x >= 0).map((point) => point.map((each) => each.toFixed(2)));
  if (seen.length < 2) return null;
  const path = seen.map((point) => point.join(" ")).join("L");
  const area = svg("path", { d: `M${seen[0][0]} 30L${path}L${seen[seen.length - 1][0]} 30Z`, fill: "var(--line)" });
  const pen = { fill: "none", stroke: "var(--soft)", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" };
  const label = `${tier} memory over ${span / 60} minutes, now ${bytes(used[used.length - 1])} of ${bytes(sizeBytes)}`;
  const box = { class: "line", viewBox: "0 0 100 30", preserveAspectRatio: "none", width: "100%", height: 30 };
  return svg("svg", { ...box, role: "img", "aria-label": label }, area, svg("path", { d: `M${path}`, ...pen }));
}
