// Elements out of text, and numbers as people read them. Text never becomes markup: names come from others.

const SVG = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => made(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

// Puts new children into an element; what was scrolled stays so, and what had the focus has it again.
export function fill(id, ...children) {
  const box = byId(id);
  const scrolled = [...box.querySelectorAll(".wide")].map((each) => each.scrollLeft);
  const focused = box.contains(document.activeElement) ? document.activeElement.id : "";
  box.replaceChildren(...children.filter((child) => child !== null));
  [...box.querySelectorAll(".wide")].forEach((each, at) => { each.scrollLeft = scrolled[at] || 0; });
  if (focused && byId(focused)) byId(focused).focus();
}

// A table; the first `words` columns hold words, the others figures. Cells are text or elements.
export function table(heads, rows, words = 1) {
  const line = (tag, cells) => el("tr", null, ...cells.map((cell, at) => el(tag, { class: at < words ? null : "n" }, cell)));
  const body = rows.map((cells) => line("td", cells));
  return el("div", { class: "wide" }, el("table", null, el("thead", null, line("th", heads)), el("tbody", null, ...body)));
}

export const note = (text) => el("p", { class: "small" }, text);

// ---- numbers ------------------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(size) {
  let at = 0;
  while (size >= 1024 && at < UNITS.length - 1) { size /= 1024; at += 1; }
  return `${at && size < 100 ? size.toFixed(1) : Math.round(size)} ${UNITS[at]}`;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// Rounded before it is cut into units: 119.7 s are 2 min 0 s.
export function seconds(amount) {
  if (amount < 0.001) return "< 1 ms";
  if (amount < 0.9995) return `${Math.round(amount * 1000)} ms`;
  if (amount < 59.5) return `${amount.toFixed(amount < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(amount), minutes = Math.round(amount / 60);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const ago = (amount) => (amount < 2 ? "now" : `${seconds(Math.floor(amount))} ago`);
