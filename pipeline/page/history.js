// The history of a DAG: its runs as a table that sorts by any metric, and chosen ones over each other.
import { better } from "./better.js";
import { Curves, ordered } from "./curves.js";
import {
  badge,
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
} from "./dom.js";

function nodes({ hosts, run }) {
  return listOf(hosts).length || (run && (fieldsOf(run).nnodes ?? 1)) || null;
}

/** Describe the columns: a value to sort by, and a cell. */
function columnsOf(rows, best) {
  const names = ordered(
    new Set(
      rows.flatMap((row) =>
        Object.entries(fieldsOf(row.report.metrics))
          .filter(([, v]) => isNumber(v))
          .map(([name]) => name),
      ),
    ),
  );
  const metrics = names.map((name) => ({
    ...{
      id: `metric ${name}`,
      title: name,
      kind: "right",
      value: (row) => fieldOf(row.report.metrics, name),
    },
    cell: (row, value) => [
      best.get(name) === row &&
        h("span", { class: "badge best", title: `The best ${name} of all that succeeded` }, "best"),
      number(value),
    ],
  }));
  return [
    {
      id: "run",
      title: "Run",
      value: (row) => exact(row.id),
      cell: (row) => link(row.href, exact(row.id), row.onClick),
    },
    { id: "state", title: "State", value: (row) => row.state, cell: (row) => badge(row.state) },
    { id: "start", title: "Began", value: (row) => row.began, cell: (row) => moment(row.start) },
    {
      id: "seconds",
      title: "Took",
      kind: "right",
      value: (row) => row.seconds,
      cell: (row, value) => lasted(value),
    },
    {
      id: "nodes",
      title: "Nodes",
      kind: "right",
      value: (row) => nodes(row.report),
      cell: (row, value) => number(value),
    },
    ...metrics,
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

function read(row) {
  const report = fieldsOf(row.document);
  const began = isNumber(row.start) ? row.start : Date.parse(row.start) / 1000;
  return { ...row, report, began: Number.isNaN(began) ? null : began, state: row.state || report.state };
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
    this.rows = listOf(rows).map(fieldsOf).map(read);
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
      this.curves.update(drawn.map((row) => ({ label: exact(row.id), report: row.report })));
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
      "aria-label": `Draw ${exact(row.id)}`,
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
 * @returns {{update: (rows: object[]) => void, destroy: () => void}}
 */
export function mountHistory(root, options = {}) {
  root.classList.add("manycpu");
  if (typeof options.dark === "boolean") root.dataset.theme = options.dark ? "dark" : "light";
  const history = new History(options);
  root.replaceChildren(history.element);
  return { update: (rows) => history.update(rows), destroy: () => root.replaceChildren() };
}
