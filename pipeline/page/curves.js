// All metrics of one run, or of several, as small charts: loss first and large, over steps or over time.
import { Chart } from "./chart.js";
import { fieldOf, fieldsOf, h, isNumber, listOf } from "./dom.js";

const FIRST = ["loss", "learning_rate", "samples_per_second"];
const COLORS = 8;
const isPlace = (value) => isNumber(value) && Math.abs(value) < 1e300; // two of them have a difference
let groups = 0;

/** Order names: loss, learning rate, throughput, then the alphabet. */
export function ordered(names) {
  const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return [...names].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

/** Read the columns of a series as points; what is no number is left out. */
function readPoints(series) {
  const { index, steps, times, values } = fieldsOf(series);
  const points = listOf(values).map((y, at) => ({
    y,
    index: isPlace(listOf(index)[at]) ? index[at] : at,
    step: listOf(steps)[at],
    time: listOf(times)[at],
  }));
  return points.filter((point) => isPlace(point.y));
}

/** Find when a run's first point was written, in seconds since the epoch; Infinity: no point has a time. */
function began(report) {
  const times = Object.values(fieldsOf(report.series)).flatMap((series) => listOf(fieldsOf(series).times));
  return times.filter(isPlace).reduce((least, time) => Math.min(least, time), Infinity);
}

/** Place points along an axis; where no step was reported, they are counted. */
function placed(lines, axis) {
  const all = lines.flatMap((line) => line.raw);
  const has = (name) => all.length > 0 && all.every((point) => isPlace(point[name]));
  const [unit, x] =
    axis === "time" && has("time")
      ? ["time", (point, start) => point.time - start]
      : has("step")
        ? ["step", (point) => point.step]
        : ["point", (point) => point.index];
  const drawn = lines.map(({ label, color, raw, start }) => ({
    ...{ label, color },
    points: raw.map((point) => ({ x: x(point, start), y: point.y })),
  }));
  return { unit, lines: drawn };
}

export class Curves {
  constructor() {
    this.axis = "step";
    this.charts = new Map();
    this.grid = h("div", { class: "charts" });
    this.legend = h("div", { class: "legend" });
    this.choice = h("div", { class: "choice", role: "radiogroup", "aria-label": "Horizontal axis" });
    const name = `manycpu-axis-${(groups += 1)}`;
    for (const [axis, text] of [
      ["step", "Steps"],
      ["time", "Time"],
    ]) {
      const input = h("input", { type: "radio", name, value: axis, checked: axis === this.axis });
      input.onchange = () => {
        this.axis = axis;
        this.draw();
      };
      this.choice.append(h("label", null, input, h("span", null, text)));
    }
    this.title = h("h2", null, "Curves");
    const head = h("div", { class: "section-head" }, this.title, this.choice);
    this.element = h("section", { class: "curves" }, head, this.legend, this.grid);
  }

  /** @param {{label: string, title?: string, report: object}[]} runs whose curves are drawn over each other */
  update(runs) {
    this.runs = runs.map(({ label, title, report }, at) => ({
      label,
      title,
      report,
      color: at % COLORS,
      start: began(report),
    }));
    this.draw();
  }

  /** Draw a chart for each metric, the first one large, and remove charts of metrics that are gone. */
  draw() {
    const names = ordered(new Set(this.runs.flatMap((run) => Object.keys(fieldsOf(run.report.series)))));
    const metrics = names.map((name) => [name, placed(this.linesOf(name), this.axis)]);
    // A single value is no curve: the table of metrics has it.
    const shown = metrics.filter(([, { lines }]) => lines.some((line) => line.points.length > 1));
    this.element.hidden = !shown.length;
    this.drawLegend();
    this.drop(new Set(shown.map(([name]) => name)));
    const axes = sharedAxes(shown.map(([, metric]) => metric));
    shown.forEach(([name, { unit, lines }], at) => {
      const chart = this.chart(name, at === 0);
      chart.update(lines, axes[unit]);
      if (this.grid.children[at] !== chart.element)
        this.grid.insertBefore(chart.element, this.grid.children[at] || null);
    });
  }

  linesOf(name) {
    return this.runs
      .map(({ label, color, start, report }) => ({
        label,
        color,
        start,
        raw: readPoints(fieldOf(report.series, name)),
      }))
      .filter((line) => line.raw.length);
  }

  /** Find the chart of a metric, or make it: again if its size must change. */
  chart(name, large) {
    const present = this.charts.get(name);
    if (present && present.large === large) return present;
    if (present) present.element.remove();
    const chart = new Chart(name, large, (x, from) => this.point(x, from));
    this.charts.set(name, chart);
    return chart;
  }

  /** Show the same place in all charts that have the same axis. */
  point(x, from) {
    this.charts.forEach((chart) => chart.show(chart.axis.unit === from.axis.unit ? x : null));
  }

  /** Remove the charts of all metrics but these. */
  drop(names) {
    for (const [name, chart] of this.charts) {
      if (names.has(name)) continue;
      chart.element.remove();
      this.charts.delete(name);
    }
  }

  drawLegend() {
    const several = this.runs.length > 1 ? this.runs : [];
    const entries = several.map(({ label, title, color }) =>
      h("span", { class: `entry c${color}`, title }, h("i"), label),
    );
    this.legend.replaceChildren(...entries);
  }
}

/** Find how far each axis reaches, the same for all metrics: what happened together stands together. */
function sharedAxes(metrics) {
  const axes = {};
  for (const { unit, lines } of metrics) {
    const places = lines.flatMap((line) => line.points.map((point) => point.x));
    const axis = (axes[unit] ||= { unit, low: Infinity, high: -Infinity });
    axis.low = Math.min(axis.low, ...places);
    axis.high = Math.max(axis.high, ...places);
  }
  for (const axis of Object.values(axes)) if (axis.low > 0 && axis.low < axis.high / 10) axis.low = 0;
  return axes;
}
