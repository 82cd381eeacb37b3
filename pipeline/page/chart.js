// One chart: a metric of one run, or of several over each other. It answers to the pointer and to arrow keys.
import { duration, exact, h, isNumber, s, short } from "./dom.js";

const SIZE = 1000; // the drawing's own units; CSS stretches it, and lines keep their width
const MOVES = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

/** Choose round numbers between two, at most `most`: with a distance of `steps`, if given, and at least `least`. */
export function ticks(low, high, most, steps, least = 0) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / most));
  const usual = [1, 2, 5, 10, 20, 50].map((factor) => factor * power);
  const choice = steps && span > most ? [...steps, ...usual] : usual;
  const step = choice.find((each) => each >= least && span / each <= most) || span;
  const first = Math.ceil(low / step - 1e-9); // a rounding error must not lose the first or the last one
  const count = Math.floor(high / step + 1e-9) - first;
  const all = Array.from({ length: Math.max(1, count + 1) }, (_, at) =>
    Number(((first + at) * step).toPrecision(12)),
  );
  return [...new Set(all)];
}

/** Write the numbers of an axis alike, with as many digits as tell them apart. */
export function labels(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0]) || 1;
  const size = Math.max(...values.map(Math.abs));
  if (values.length === 1) return [short(values[0])];
  if (size >= 1e7 || size < 1e-3) {
    const digits = Math.min(6, Math.max(0, Math.round(Math.log10(size / step))));
    return values.map((value) => (value === 0 ? "0" : value.toExponential(digits).replace("e+", "e")));
  }
  const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const format = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return values.map((value) => value.toLocaleString("en-US", format));
}

/** Find the range to draw: a constant lies in the middle, nothing touches the edge. */
function range(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const edge = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
  return [low - edge, high + edge];
}

export class Chart {
  /**
   * @param {string} name of the metric
   * @param {boolean} large
   * @param {(x: number | null, from: Chart) => void} onCursor receives where a person points
   */
  constructor(name, large, onCursor) {
    this.name = name;
    this.onCursor = onCursor;
    this.lines = [];
    this.at = null;
    this.dots = [];
    this.value = h("output", { class: "value" });
    this.where = h("span", { class: "where" });
    this.drawing = h("div", { class: "drawing" });
    this.rule = h("div", { class: "rule", hidden: true });
    this.plot = h(
      "div",
      {
        ...{ class: "plot", tabindex: "0", role: "slider", "aria-label": name },
        ...{ onkeydown: (event) => this.key(event), onblur: () => this.onCursor(null, this) },
        ...{ onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event) },
        onpointerleave: () => this.onCursor(null, this),
      },
      this.drawing,
      this.rule,
    );
    const title = h("h3", { title: name }, name);
    const head = h(
      "div",
      { class: "chart-head" },
      title,
      h("span", { class: "reading" }, this.value, this.where),
    );
    this.element = h("div", { class: large ? "chart large" : "chart", "data-metric": name }, head, this.plot);
    this.large = large;
  }

  /**
   * Draw lines, unless they are drawn already.
   * @param {{label: string, points: {x: number, y: number}[], color: number}[]} lines
   * @param {{unit: string, low: number, high: number}} axis
   */
  update(lines, axis) {
    const drawn = JSON.stringify([axis, lines]);
    if (drawn === this.drawn) return;
    Object.assign(this, { drawn, lines, axis });
    const points = lines.flatMap((line) => line.points);
    const [low, high] = range(points.map((point) => point.y));
    this.low = low;
    this.high = high;
    const across = ticks(
      axis.low,
      axis.high,
      this.large ? 8 : 4,
      axis.unit === "time" ? TIMES : null,
      axis.unit === "time" ? 0 : 1,
    );
    const up = ticks(low, high, this.large ? 6 : 4);
    this.drawing.replaceChildren(this.svg(across, up), ...this.xLabels(across), ...this.yLabels(up));
    this.dots.forEach((dot) => dot.remove());
    this.dots = lines.map((line) => h("div", { class: `dot c${line.color}`, hidden: true }));
    this.plot.append(...this.dots);
    this.show(this.at);
  }

  /** Give the place of a value on the horizontal axis, from 0 to 1; the middle if the axis has no length. */
  left(x) {
    const { low, high } = this.axis;
    return high > low ? (x - low) / (high - low) : 0.5;
  }

  /** Give the place of a value on the vertical axis, from 0 at the top to 1. */
  top(y) {
    return (this.high - y) / (this.high - this.low);
  }

  svg(across, up) {
    const place = (share) => (share * SIZE).toFixed(1);
    const grid = [
      ...up.map((y) =>
        s("line", { class: "grid", x1: 0, x2: SIZE, y1: place(this.top(y)), y2: place(this.top(y)) }),
      ),
      ...across.map((x) =>
        s("line", { class: "tick", x1: place(this.left(x)), x2: place(this.left(x)), y1: 0, y2: SIZE }),
      ),
    ];
    const curve = ({ points, color }) => {
      const places = points.map(({ x, y }) => `${place(this.left(x))} ${place(this.top(y))}`);
      const isAlone = places.length === 1; // a line of no length is drawn as a dot
      const path = isAlone ? `M${places[0]}h0` : `M${places.join("L")}`;
      return s("path", { class: `curve c${color}${isAlone ? " alone" : ""}`, d: path });
    };
    const box = { viewBox: `0 0 ${SIZE} ${SIZE}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    return s("svg", box, grid, this.lines.map(curve));
  }

  xLabels(across) {
    const texts = this.axis.unit === "time" ? across.map((x) => (x ? duration(x) : "0")) : labels(across);
    return across.map((x, at) => {
      const share = this.left(x);
      const side = share > 0.93 ? " end" : share < 0.05 ? " start" : "";
      return h(
        "span",
        { class: `x-label${side}`, "--at": share.toFixed(4), "aria-hidden": "true" },
        texts[at],
      );
    });
  }

  yLabels(up) {
    const texts = labels(up);
    return up.map((y, at) =>
      h("span", { class: "y-label", "--at": this.top(y).toFixed(4), "aria-hidden": "true" }, texts[at]),
    );
  }

  /** Tell where on the horizontal axis the pointer is. */
  point(event) {
    const box = this.plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / (box.width || 1)));
    this.onCursor(this.axis.low + share * (this.axis.high - this.axis.low), this);
  }

  /** Move to another point by an arrow key, or to none by Escape; the first key begins at the last point. */
  key(event) {
    if (event.key === "Escape") return this.onCursor(null, this);
    const move = MOVES[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const places = [...new Set(this.lines.flatMap((line) => line.points.map((point) => point.x)))].sort(
      (a, b) => a - b,
    );
    if (!places.length) return;
    const present = this.at === null ? places.length : nearest(places, this.at);
    const next = Math.min(places.length - 1, Math.max(0, present + move));
    this.onCursor(places[next], this);
  }

  /** Show the values at a place, or the last ones. */
  show(at) {
    this.at = at;
    const chosen = this.lines.map(({ points }) =>
      at === null
        ? points.at(-1)
        : points[
            nearest(
              points.map((point) => point.x),
              at,
            )
          ],
    );
    const first = chosen.find(Boolean);
    this.rule.hidden = at === null || !first;
    // The points of several lines may stand at different places: the rule is where a person points.
    if (!this.rule.hidden)
      this.rule.style.setProperty("--at", this.left(chosen.length > 1 ? at : first.x).toFixed(4));
    this.dots.forEach((dot, number) => this.mark(dot, chosen[number], at));
    this.read(chosen, first, at);
  }

  /** Put the dot of a line on its chosen point; hide it where a person points at nothing. */
  mark(dot, point, at) {
    dot.hidden = at === null || !point;
    if (dot.hidden) return;
    dot.style.setProperty("--x", this.left(point.x).toFixed(4));
    dot.style.setProperty("--y", this.top(point.y).toFixed(4));
  }

  /** Write the values of the chosen points, and where they are; also for screen readers. */
  read(chosen, first, at) {
    const parts = chosen.flatMap((point, number) => {
      if (!point) return [];
      const color = this.lines.length > 1 ? `c${this.lines[number].color}` : "";
      return [
        h("span", { class: color, title: exact(point.y), "data-value": exact(point.y) }, short(point.y)),
      ];
    });
    this.value.replaceChildren(...parts);
    this.where.textContent =
      at === null || !first
        ? ""
        : ` ${chosen.length > 1 ? "near" : "at"} ${this.place(chosen.length > 1 ? at : first.x)}`;
    const told = `${chosen.map((point) => (point ? short(point.y) : "none")).join(", ")} at ${first ? this.place(first.x) : ""}`;
    this.plot.setAttribute("aria-valuetext", told);
    this.plot.setAttribute("aria-valuenow", first && isNumber(first.y) ? first.y : 0);
  }

  place(x) {
    return this.axis.unit === "time" ? duration(x) || "0 s" : `${this.axis.unit} ${short(Math.round(x))}`;
  }
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, at) => {
    if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at;
  });
  return best;
}
