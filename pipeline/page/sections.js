// What a report says beside its curves: each function takes the report and gives elements, or nothing.
import {
  ago,
  badge,
  countOf,
  duration,
  exact,
  fieldOf,
  fieldsOf,
  h,
  isNumber,
  known,
  lasted,
  link,
  listOf,
  moment,
  mood,
  number,
  plural,
  section,
  short,
  table,
  textOf,
} from "./dom.js";

const UNDER_WAY = new Set(["running", "pending"]);
const OWN_TASKS = new Set(["prepare", "stage", "build", "export", "cleanup"]); // steps that are tasks by the same name
const AT_WORK = new Set(["running", "deferred"]);
const firstLine = (text) => (textOf(text) ? text.trim().split("\n")[0] : null);

/** Say in one sentence how it is, and what it waits for. */
function sentence(report) {
  const reason = firstLine(report.reason);
  if (reason) return reason;
  const took = duration(seconds(report));
  const after = report.attempts > 1 ? ` after ${report.attempts} attempts` : "";
  const told = {
    succeeded: `It finished${took ? ` in ${took}` : ""}${after}.`,
    failed: `It failed${after}.`,
    cancelled: "It was cancelled.",
    running: "The training runs.",
    pending: "It waits to begin.",
  };
  return fieldOf(told, report.state) || "";
}

/** Add up what the steps took. */
function seconds(report) {
  const all = Object.values(fieldsOf(report.verbs)).map((verb) => fieldsOf(verb).seconds);
  return all.some(isNumber) ? all.filter(isNumber).reduce((sum, each) => sum + each, 0) : null;
}

export function head(report, now) {
  const title = h("h1", null, textOf(report.name) || "A training");
  const words = h(
    "p",
    { class: "sentence" },
    badge(report.state),
    h("span", { class: "words" }, sentence(report)),
  );
  return [h("div", { class: "title" }, title, words), progress(report), facts(report, now)];
}

function progress({ progress: told, state }) {
  const { step, total_steps: total, seconds_left: left, epoch } = fieldsOf(told);
  if (!isNumber(step) || !UNDER_WAY.has(state)) return null;
  const words = [
    `step ${short(step)}${isNumber(total) ? ` of ${short(total)}` : ""}`,
    isNumber(epoch) && `epoch ${short(epoch)}`,
    isNumber(left) && `about ${duration(Math.round(left))} left`,
  ];
  const bar = total > 0 && h("progress", { max: total, value: Math.min(step, total), "aria-label": "steps" });
  return h("div", { class: "progress" }, bar, h("span", null, words.filter(Boolean).join(" · ")));
}

/** Show when the report was written, and how long ago, where a person looks for the next one. */
function writing(time, now) {
  const age = isNumber(time) && isNumber(now);
  return [moment(time), age && [" ", h("span", { class: "age", "data-since": time }, ago(time, now))]];
}

function facts(report, now) {
  const { dtype, device } = fieldsOf(report.run);
  const { kind, launch } = fieldsOf(report.target);
  const { loss, samples_per_second: pace } = fieldsOf(report.metrics);
  const hosts = countOf(report, "hosts");
  const all = [
    ["Loss", isNumber(loss) && number(loss)],
    ["Samples per second", isNumber(pace) && number(pace)],
    [
      "Ranks",
      known(report.world_size) && [number(report.world_size), hosts ? ` on ${plural(hosts, "host")}` : ""],
    ],
    [
      "Backend",
      textOf(report.backend) && h("span", { title: textOf(report.backend_reason) }, report.backend),
    ],
    ["dtype", [textOf(dtype), device !== "cpu" && textOf(device)].filter(Boolean).join(" on ")],
    ["Target", [textOf(kind), textOf(launch)].filter(Boolean).join(", ")],
    ["Attempt", isNumber(report.attempts) && number(report.attempts)],
    ["All steps", !UNDER_WAY.has(report.state) && isNumber(seconds(report)) && lasted(seconds(report))],
    ["Written", known(report.time) && writing(report.time, now)],
  ];
  const shown = all.filter(([, value]) => value);
  return (
    shown.length > 0 &&
    h(
      "dl",
      { class: "facts" },
      shown.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
    )
  );
}

/** Show what went wrong, or asks for attention: an error, what is left behind, warnings. */
export function problems(report) {
  const error = textOf(report.error);
  const left = listOf(report.left_behind);
  const warnings = listOf(report.warnings);
  return [
    error &&
      h("div", { class: "notice bad", role: "alert" }, h("strong", null, "Error"), h("pre", null, error)),
    left.length > 0 && notice("bad", "Left behind", left),
    warnings.length > 0 &&
      notice(
        "warn",
        plural(countOf(report, "warnings"), "warning").replace(/^./, (c) => c.toUpperCase()),
        warnings,
      ),
  ];
}

function notice(kind, title, lines) {
  return h(
    "div",
    { class: `notice ${kind}` },
    h("strong", null, title),
    h(
      "ul",
      null,
      lines.map((line) => h("li", null, exact(line))),
    ),
  );
}

/** Find the step that still runs, up to now, as the tasks tell; while the training runs that is `wait`. */
function present(report, verbs, tasks) {
  const task = tasks.find(({ state, seconds: took }) => AT_WORK.has(state) && isNumber(took));
  if (!task) return null;
  if (OWN_TASKS.has(task.name)) return { name: task.name, seconds: task.seconds, result: "running" };
  if (!UNDER_WAY.has(report.state)) return null;
  const others = new Set(["wait", ...tasks.map(({ name }) => name)]);
  const before = verbs.filter(({ name, seconds: took }) => !others.has(name) && isNumber(took));
  const spent = before.reduce((sum, verb) => sum + verb.seconds, 0);
  return { name: "wait", seconds: Math.max(0, task.seconds - spent), result: report.state };
}

/** List the steps that were taken, and the one that still runs. */
function stepsOf(report, tasks) {
  const verbs = Object.entries(fieldsOf(report.verbs)).map(([name, verb]) => ({ name, ...fieldsOf(verb) }));
  const now = verbs.length > 0 && present(report, verbs, tasks);
  return now ? [...verbs.filter(({ name }) => name !== now.name), now] : verbs;
}

/** Show the steps of the pipeline: one bar, and below it what each took and how it went. */
export function steps(report, tasks) {
  const verbs = stepsOf(report, tasks);
  const timed = verbs.some((verb) => isNumber(verb.seconds)) ? verbs : tasks;
  const drawn = timed.filter((verb) => verb.seconds > 0);
  const bar = drawn.map((verb) => segment(verb, timed.indexOf(verb)));
  return [
    timed.length > 0 &&
      section(
        "Steps",
        "steps",
        drawn.length > 0 && h("div", { class: "bar", "aria-hidden": "true" }, bar),
        verbs.length > 0 && h("ul", { class: "parts" }, verbs.map(step)),
      ),
    tasks.length > 0 && section("Tasks and logs", "tasks", taskTable(tasks)),
  ];
}

function segment({ name, seconds: took, result, state }, at) {
  const kind = { bad: " failed", busy: " running" }[mood(result || state)] || "";
  return h(
    "span",
    { class: `part p${at % 8}${kind}`, "--share": took, title: `${name}: ${duration(took)}` },
    h("b", null, name),
  );
}

function step(verb, at) {
  const swatch = h("i", { class: `swatch p${at % 8}` });
  const error = textOf(verb.error) && h("p", null, firstLine(verb.error));
  return h(
    "li",
    { "data-key": verb.name },
    swatch,
    h("b", null, verb.name),
    " ",
    lasted(verb.seconds),
    " ",
    badge(verb.result),
    error,
  );
}

function taskTable(tasks) {
  const rows = tasks.map((task) => ({
    key: exact(task.name),
    cells: [
      exact(task.name),
      badge(task.state),
      moment(task.start),
      lasted(task.seconds),
      textOf(task.href) && link(task.href, "Log", task.onClick),
    ],
  }));
  return table([["Task"], ["State"], ["Began"], ["Took", "right"], ["Log"]], rows, { "aria-label": "Tasks" });
}

export function attempts(report) {
  const ends = listOf(report.history).map(fieldsOf);
  if (!ends.length) return null;
  const rows = ends.map((end, at) => ({
    key: at,
    cells: [number(end.attempt), badge(end.state), lasted(end.seconds), textOf(end.reason)],
  }));
  return section(
    "Attempts",
    "attempts",
    table([["Attempt"], ["End"], ["Took", "right"], ["Why", "wide"]], rows, {
      "aria-label": "Attempts",
    }),
  );
}

export function rounds(report) {
  const all = listOf(report.rounds).map(fieldsOf);
  if (all.length < 2) return null;
  const rows = all.map((round, at) => ({ key: at, cells: roundRow(report, all, round, at) }));
  const heads = [["Round"], ["Ranks", "right"], ["Hosts"], ["Began"], ["Took", "right"], ["End"]];
  return section("Rounds", "rounds", table(heads, rows, { "aria-label": "Rounds" }));
}

function roundRow(report, all, round, at) {
  const next = all[at + 1];
  const took = next && next.began > 0 && round.began > 0 ? next.began - round.began : null;
  const change =
    next && next.world_size !== round.world_size ? ` with ${plural(next.world_size, "rank")}` : "";
  const end = next ? `the ranks met again${change}` : badge(report.state);
  return [
    number(round.round),
    number(round.world_size),
    listOf(round.hosts).map(exact).join(", "),
    moment(round.began || null),
    lasted(took),
    end,
  ];
}
