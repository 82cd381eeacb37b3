// The history of a DAG: its runs as a table that sorts by any metric, and chosen ones over each other.
import { better } from "./better.js";
import { Curves, ordered } from "./curves.js";
import { differences, shortened } from "./differences.js";
import {
  badge,
  countOf,
  exact,
  fieldOf,
  fieldsOf,
  fill,
  h,
  isNumber,
  known,
  lasted,
  link,
  listOf,
  moment,
  mood,
  number,
  textOf,
} from "./dom.js";

const PAIRS = 4; // of what differs, in a cell
const LEGEND = 2; // and beside a name in the legend

function nodes(report) {
  return countOf(report, "hosts") || (report.run && (fieldsOf(report.run).nnodes ?? 1)) || null;
}

/** Add up what the attempts took; null where the training still runs, or no time was reported. */
function trained({ history, state, verbs }) {
  if (mood(state) === "busy") return null;
  const ends = listOf(history).map((end) => fieldsOf(end).seconds);
  const told = ends.some(isNumber) ? ends : [fieldsOf(fieldsOf(verbs).wait).seconds];
  return told.some(isNumber) ? told.filter(isNumber).reduce((sum, each) => sum + each, 0) : null;
}

const said = (pairs) => pairs.map(([name, value]) => `${name} ${shortened(value)}`);

/** Show pairs of what differs; those that have no room stand in the tooltip with all of them. */
function differs(pairs) {
  if (!pairs.length) return h("span", { class: "none" }, "–");
  const whole = pairs.map(([name, value]) => `${name}: ${value}`).join("\n");
  const shown = pairs
    .slice(0, PAIRS)
    .map(([name, value]) => [h("span", { class: "pair" }, h("i", null, name), ` ${shortened(value)}`), " "]);
  const more = pairs.length - PAIRS;
  return h("span", { title: whole }, shown, more > 0 && h("span", { class: "none" }, `and ${more} more`));
}

const named = (row) => h("span", { class: "name", title: exact(row.id) }, link(row.href, row.name, row.onClick));

/** Show how long a training took; where no time was reported, how long the whole run did, and say so. */
function took(row) {
  const own = trained(row.report);
  if (own !== null || !isNumber(row.seconds)) return lasted(own);
  const title = "How long the training itself took is not known: this is the whole run";
  return [lasted(row.seconds), h("span", { class: "none", title }, " in all")];
}

function metricColumns(rows, best) {
  const numbers = rows.flatMap((row) =>
    Object.entries(fieldsOf(row.report.metrics)).filter(([, value]) => isNumber(value)),
  );
  return ordered(new Set(numbers.map(([name]) => name))).map((name) => ({
    ...{ id: `metric ${name}`, title: name, kind: "right" },
    value: (row) => fieldOf(row.report.metrics, name),
    cell: (row, value) => [
      best.get(name) === row &&
        h("span", { class: "badge best", title: `The best ${name} of all that succeeded` }, "best"),
      number(value),
    ],
  }));
}

/** Describe the columns: a value to sort by, and a cell. What tells runs apart comes first, then metrics. */
function columnsOf(rows, best) {
  const different = {
    ...{ id: "differs", title: "What differs", kind: "differs" },
    value: (row) => said(row.pairs).join(" "),
    cell: (row) => differs(row.pairs),
  };
  return [
    { id: "run", title: "Run", value: (row) => exact(row.id), cell: named },
    { id: "state", title: "State", value: (row) => row.state, cell: (row) => badge(row.state) },
    ...(rows.some((row) => row.pairs.length) ? [different] : []),
    {
      ...{ id: "seconds", title: "Trained", kind: "right" },
      value: (row) => trained(row.report) ?? row.seconds,
      cell: took,
    },
    ...metricColumns(rows, best),
    {
      ...{ id: "nodes", title: "Nodes", kind: "right" },
      value: (row) => nodes(row.report),
      cell: (row, value) => number(value),
    },
    { id: "start", title: "Began", value: (row) => row.began, cell: (row) => moment(row.start) },
  ];
}

/** Find the best run of each metric, of those that succeeded and differ in it. */
function bestOf(rows) {
  const best = new Map();
  const worst = new Map();
  for (const row of rows.filter((each) => mood(each.state) === "good")) {
    for (const [name, value] of Object.entries(fieldsOf(row.report.metrics))) {
      if (!isNumber(value) || !better(name)) continue;
      const ahead = (other) => (value - fieldOf(other.report.metrics, name)) * better(name);
      if (!best.has(name) || ahead(best.get(name)) > 0) best.set(name, row);
      if (!worst.has(name) || ahead(worst.get(name)) < 0) worst.set(name, row);
    }
  }
  return new Map([...best].filter(([name, row]) => row !== worst.get(name)));
}

function compare(a, b) {
  if (isNumber(a) && isNumber(b)) return a - b;
  return exact(a).localeCompare(exact(b), "en", { numeric: true });
}

function sorted(rows, { value }, descending) {
  const has = (row) => known(value(row));
  const ranked = rows.filter(has).sort((a, b) => compare(value(a), value(b)) * (descending ? -1 : 1));
  return [...ranked, ...rows.filter((row) => !has(row))]; // what has no value comes last, either way
}

function readRow(row) {
  const report = fieldsOf(row.document);
  const began = isNumber(row.start) ? row.start : Date.parse(row.start) / 1000;
  const state = row.state || report.state;
  return { ...row, report, began: Number.isNaN(began) ? null : began, state, name: textOf(row.name) ?? exact(row.id) };
}

/** Name a run where its curve is drawn, by what tells it apart. */
function labelOf({ id, name, pairs }) {
  const label = [name, said(pairs.slice(0, LEGEND)).join(", ")].filter(Boolean).join(" · ");
  return { label, title: [exact(id), ...pairs.map(([of, value]) => `${of}: ${value}`)].join("\n") };
}

class History {
  constructor(options) {
    Object.assign(this, { options, rows: [], chosen: new Set(), sort: "start", descending: true });
    this.curves = new Curves();
    this.curves.title.textContent = "Chosen runs over each other";
    this.curves.element.hidden = true;
    this.above = h("div", { class: "slot" });
    this.body = h("div", { class: "slot" });
    this.element = h("main", { class: "history" }, this.above, this.body, this.curves.element);
  }

  update(rows) {
    const read = listOf(rows).map(fieldsOf).map(readRow);
    const pairs = differences(read.map((row) => row.report));
    this.rows = read.map((row, at) => ({ ...row, pairs: pairs[at] }));
    const present = new Set(this.rows.map((row) => row.id));
    for (const id of this.chosen) if (!present.has(id)) this.chosen.delete(id);
    this.draw();
  }

  draw() {
    const columns = columnsOf(this.rows, bestOf(this.rows));
    const by = columns.find((column) => column.id === this.sort) || columns[0];
    const rows = sorted(this.rows, by, this.descending);
    fill(this.above, this.words());
    fill(this.body, this.rows.length > 0 && this.table(columns, rows));
    const drawn = [...this.chosen].map((id) => rows.find((row) => row.id === id));
    if (drawn.length > 1)
      this.curves.update(drawn.map((row) => ({ ...labelOf(row), report: row.report })));
    else this.curves.element.hidden = true;
  }

  words() {
    if (!this.rows.length) return h("p", { class: "note" }, "No run of this DAG has trained anything yet.");
    const count = this.chosen.size;
    const told =
      count > 1
        ? `${count} runs are drawn below.`
        : "Choose two or more runs to draw their curves over each other.";
    return h(
      "p",
      { class: "note", role: "status" },
      told,
      " Of losses, errors and costs the lowest is best, of scores and throughputs the highest; a name that says neither has no best.",
    );
  }

  table(columns, rows) {
    const head = h(
      "tr",
      null,
      h("th", { scope: "col" }, h("span", { class: "unseen" }, "Chosen")),
      columns.map((column) => this.head(column)),
    );
    const body = rows.map((row) =>
      h(
        "tr",
        { "data-key": exact(row.id), class: this.chosen.has(row.id) ? "chosen" : null },
        this.cells(columns, row),
      ),
    );
    const whole = h("table", null, h("thead", null, head), h("tbody", null, body));
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, whole);
  }

  head({ id, title, kind }) {
    const here = this.sort === id;
    const way = here ? (this.descending ? "descending" : "ascending") : null;
    const arrow = h(
      "span",
      { class: "arrow", "aria-hidden": "true" },
      here ? (this.descending ? "▾" : "▴") : "",
    );
    return h(
      "th",
      { scope: "col", class: kind, "aria-sort": way },
      h("button", { type: "button", title, onclick: () => this.sortBy(id, title) }, title, arrow),
    );
  }

  sortBy(id, title) {
    // A metric begins with its best; what is no metric with the latest, the longest, the most.
    this.descending = this.sort === id ? !this.descending : !id.startsWith("metric ") || better(title) >= 0;
    this.sort = id;
    this.draw();
  }

  cells(columns, row) {
    const box = h("input", {
      type: "checkbox",
      checked: this.chosen.has(row.id),
      "aria-label": `Draw ${labelOf(row).label}`,
    });
    box.onchange = () => {
      this.chosen[this.chosen.has(row.id) ? "delete" : "add"](row.id);
      this.draw();
    };
    return [
      h("td", null, box),
      ...columns.map((column) => h("td", { class: column.kind }, column.cell(row, column.value(row)))),
    ];
  }
}

/**
 * Draw the history of a DAG.
 * @param {HTMLElement} root what it is drawn into
 * @param {{dark?: boolean}} options dark: missing follows the browser
 * Rows are {id, name, state, start, seconds, document, href, onClick}: a short `name` is shown for the id, `seconds` are
 * of the whole run.
 * @returns {{update: (rows: object[]) => void, destroy: () => void}}
 */
export function mountHistory(root, options = {}) {
  root.classList.add("manycpu");
  if (typeof options.dark === "boolean") root.dataset.theme = options.dark ? "dark" : "light";
  const history = new History(options);
  root.replaceChildren(history.element);
  return { update: (rows) => history.update(rows), destroy: () => root.replaceChildren() };
}
