// Elements, and the numbers and words on them. What a run says is text, and never markup.

const SVG = "http://www.w3.org/2000/svg";
const KEPT = new Set(["open", "style"]); // what a person has opened stays open

/** Make an element; attributes that are null or false are left out, functions become handlers. */
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Set attributes, handlers and CSS variables (`--name`) of an element, and append its children. */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element[name] = value;
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  const present = children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...present.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Make an element like another one, and keep each element in it: focus, selection and scrolling stay. */
export function patch(old, fresh) {
  const same = old.nodeName === fresh.nodeName && (old.dataset || {}).key === (fresh.dataset || {}).key;
  if (!same) return void old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  patchAttributes(old, fresh);
  for (const name of ["onclick", "onchange"]) old[name] = fresh[name]; // handlers are no attributes
  if ("checked" in fresh) old.checked = fresh.checked;
  const wanted = [...fresh.childNodes];
  [...old.childNodes].slice(wanted.length).forEach((extra) => extra.remove());
  wanted.forEach((child, at) =>
    at < old.childNodes.length ? patch(old.childNodes[at], child) : old.append(child),
  );
}

/** Give an element the attributes and the style of another one, except those that a person may have changed. */
function patchAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!KEPT.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
}

/** Fill a container with children, keeping what it shows already. */
export function fill(container, ...children) {
  const fresh = h(container.nodeName.toLowerCase(), null, ...children);
  const attributes = [...container.attributes].filter(({ name }) => !KEPT.has(name));
  attributes.forEach(({ name, value }) => fresh.setAttribute(name, value));
  fresh.style.cssText = container.style.cssText;
  patch(container, fresh);
}

// Reports may be of an older version, or half: what has another shape than expected counts as missing.
export const listOf = (value) => (Array.isArray(value) ? value : []);
/** Count a list of a report; the short form that Airflow has says how long it was before it was cut. */
export const countOf = (report, name) => fieldsOf(report.counts)[name] ?? listOf(report[name]).length;
export const fieldsOf = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
/** Give a field whose name a script chose, such as `constructor`, which every object has beside its own. */
export const fieldOf = (value, name) => (Object.hasOwn(fieldsOf(value), name) ? value[name] : undefined);
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const textOf = (value) => (typeof value === "string" && value.trim() ? value : null);
export const known = (value) => value !== null && value !== undefined && value !== "";

/** Give a number with four significant digits. */
export function short(value) {
  if (!isNumber(value)) return exact(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e9 || size < 1e-3)
    return value
      .toExponential(3)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

/** Give a value as the report has it. */
export function exact(value) {
  if (value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Show a number shortly, with the report's own beside it. */
export function number(value, unit = "") {
  if (!known(value)) return h("span", { class: "none" }, "–");
  return h(
    "span",
    { class: "number", title: exact(value) + unit, "data-value": exact(value) },
    short(value) + unit,
  );
}

const UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

const tidy = (digits) => String(Number(digits));
const aligned = (digits) => digits;

/** Say how long something took: "0.41 s", "1 min 21 s". */
export function duration(seconds, as = tidy) {
  if (!isNumber(seconds)) return "";
  if (seconds < 0) return `-${duration(-seconds, as)}`;
  if (seconds < 0.01 && seconds > 0) return `${as((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 10) return `${as(seconds.toPrecision(3))} s`;
  if (seconds < 59.95) return `${as(seconds.toFixed(1))} s`; // else it would round to 60.0 s
  let left = Math.round(seconds);
  const parts = UNITS.map(([unit, size]) => {
    const count = Math.floor(left / size);
    left -= count * size;
    return count ? `${count} ${unit}` : null;
  });
  return parts.filter(Boolean).slice(0, 2).join(" ");
}

/** Show how long something took, to stand below others. */
export function lasted(seconds) {
  if (!isNumber(seconds)) return h("span", { class: "none" }, "–");
  return h(
    "span",
    { class: "number", title: `${exact(seconds)} s`, "data-value": exact(seconds) },
    duration(seconds, aligned),
  );
}

/** Show a moment, in seconds since the epoch or as ISO, by the reader's clock. */
export function moment(value) {
  const date = value && new Date(isNumber(value) ? value * 1000 : value);
  if (!date || Number.isNaN(date.getTime())) return h("span", { class: "none" }, "–");
  const two = (part) => String(part).padStart(2, "0");
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  const hour = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
  return h("time", { datetime: date.toISOString(), title: exact(value) }, `${day} ${hour}`);
}

/** Say how long ago something was; of clocks that differ none makes it the future. */
export const ago = (since, now) => `${duration(Math.max(0, Math.floor(now - since)))} ago`;

export const plural = (count, word) => `${short(count)} ${word}${count === 1 ? "" : "s"}`;

const GOOD = new Set(["succeeded", "success", "done", "reused"]);
const BAD = new Set(["failed", "upstream_failed", "cancelled", "killed"]);
const BUSY = new Set(["running", "deferred", "restarting", "queued", "scheduled", "pending", "up_for_retry"]);

/** Name the class of CSS for a state of a run, a task or a verb. */
export function mood(state) {
  return GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : BUSY.has(state) ? "busy" : "idle";
}

export function badge(state) {
  return textOf(state) && h("span", { class: `badge ${mood(state)}` }, state.replaceAll("_", " "));
}

/** Make a link, unless its address would run something. */
export function link(href, text, onclick) {
  const protocol =
    textOf(href) && URL.canParse(href, document.baseURI) && new URL(href, document.baseURI).protocol;
  if (!["http:", "https:", "file:"].includes(protocol)) return h("span", null, text);
  return h("a", { href, onclick: typeof onclick === "function" ? onclick : null }, text);
}

/** Make a table; heads are [text, class], a row is a list of cells or {cells, class, key}. */
export function table(heads, rows, attributes) {
  const cells = (row) => (Array.isArray(row) ? row : row.cells);
  const kind = (at) => heads[at][1] || null;
  const head = heads.map(([text, kindOf]) => h("th", { scope: "col", class: kindOf }, text));
  const body = rows.map((row) =>
    h(
      "tr",
      { class: row.class, "data-key": row.key },
      cells(row).map((cell, at) => h("td", { class: kind(at) }, cell)),
    ),
  );
  const whole = h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", ...attributes }, whole);
}

export function section(title, name, ...children) {
  return h("section", { class: name, "data-key": name }, h("h2", null, title), children);
}
