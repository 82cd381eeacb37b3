// What came out of a run and what went into it: metrics, the model and its sources, what was asked for.
import { exact, fieldsOf, h, isNumber, known, link, listOf, plural, section, textOf } from "./dom.js";

export function metricsOf(report) {
  const all = Object.entries(fieldsOf(report.metrics)).sort(([a], [b]) => a.localeCompare(b));
  if (!all.length) return null;
  const row = ([name, value]) =>
    h(
      "div",
      { "data-key": name },
      h("dt", null, name),
      h(
        "dd",
        { class: typeof value === "number" ? "number" : null, "data-value": exact(value) },
        exact(value),
      ),
    );
  return section("Metrics", "metrics", h("dl", { class: "values" }, all.map(row)));
}

/** Show where the model is, and from what it was made. */
export function places(report) {
  const model = fieldsOf(report.export);
  const { data, model: base, code } = fieldsOf(report.digests);
  const files = isNumber(model.files) && `${plural(model.files, "file")}, ${bytes(model.bytes)}`;
  const all = [
    ["Model", textOf(model.path) || (report.export && model.path === null ? "none was to be written" : null)],
    ["", textOf(model.path) && files],
    ["Digest of the model", textOf(model.sha256)],
    ["Image", code === report.image ? null : textOf(report.image)],
    ["Digest of the code", textOf(code)],
    ["Digest of the data", textOf(data)],
    ["Digest of the base model", textOf(base)],
    ["Key of the run", textOf(report.key)],
    ...Object.entries(fieldsOf(report.trackers)).map(([name, place]) => [name, tracked(fieldsOf(place))]),
    [
      "Kept for later runs",
      listOf(report.kept).length > 0 &&
        h(
          "ul",
          null,
          listOf(report.kept).map((item) => h("li", null, exact(item))),
        ),
    ],
  ];
  const shown = all.filter(([, value]) => value);
  return shown.length > 0 && section("Model and sources", "places", pairs(shown));
}

/** Show where a tracker has the run. */
function tracked(place) {
  // An address of its own: others would lead into the page.
  const value = (what, text) => (what === "link" && /^https?:/.test(text) ? link(text, text) : text);
  const rows = Object.entries(place).map(([what, text]) =>
    h("li", null, `${what}: `, value(what, exact(text))),
  );
  return rows.length > 0 && h("ul", null, rows);
}

function bytes(count) {
  if (!isNumber(count)) return "of unknown size";
  const at = count < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(count) / 3));
  return `${Number((count / 1000 ** at).toPrecision(3))} ${["bytes", "kB", "MB", "GB", "TB"][at]}`;
}

const pairs = (all) =>
  h(
    "dl",
    { class: "pairs" },
    all.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
  );

/** Show what was asked for, and what a function returned. */
export function asked(report) {
  const shown = (fields) => Object.entries(fields).filter(([, value]) => known(value));
  const rows = [
    ...shown(fieldsOf(report.run)),
    ...shown(fieldsOf(report.target)).map(([name, value]) => [`target.${name}`, value]),
  ];
  const value = (each) => (Array.isArray(each) ? each.map(exact).join(" ") : exact(each));
  return [
    rows.length > 0 &&
      folded("What was asked for", "asked", pairs(rows.map(([name, each]) => [name, value(each)]))),
    known(report.returned) &&
      folded(
        "What the function returned",
        "returned",
        h("pre", null, JSON.stringify(report.returned, null, 2)),
      ),
  ];
}

const folded = (title, name, ...children) =>
  h("details", { class: name, "data-key": name }, h("summary", null, h("h2", null, title)), children);
