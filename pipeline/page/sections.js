// What a report says beside its curves: each function takes the report and gives elements, or nothing.
import {
  badge, duration, exact, fieldsOf, h, isNumber, known, lasted, link, listOf, moment, mood, number, plural, short, table,
  textOf,
} from "./dom.js";

const firstLine = (text) => (textOf(text) ? text.trim().split("\n")[0] : null);

/** Say in one sentence how it is, and what it waits for. */
function sentence(report) {
  const reason = firstLine(report.reason);
  if (reason) return reason;
  const took = duration(seconds(report));
  const after = report.attempts > 1 ? ` after ${report.attempts} attempts` : "";
  const told = {
    succeeded: `It finished${took ? ` in ${took}` : ""}${after}.`,
    failed: firstLine(report.error) || `It failed${after}.`,
    cancelled: firstLine(report.error) || "It was ended by a person.",
    running: "The training runs.",
    pending: "It waits to begin.",
  };
  return told[report.state] || "";
}

/** Add up what the steps took. */
function seconds(report) {
  const all = Object.values(fieldsOf(report.verbs)).map((verb) => fieldsOf(verb).seconds);
  return all.some(isNumber) ? all.filter(isNumber).reduce((sum, each) => sum + each, 0) : null;
}

export function head(report) {
  const title = h("h1", null, textOf(report.name) || "A training");
  const words = h("p", { class: "sentence" }, badge(report.state), h("span", { class: "words" }, sentence(report)));
  return [h("div", { class: "title" }, title, words), progress(report), facts(report)];
}

function progress({ progress: told, state }) {
  const { step, total_steps: total, seconds_left: left, epoch } = fieldsOf(told);
  if (!isNumber(step) || !["running", "pending"].includes(state)) return null;
  const words = [
    `step ${short(step)}${isNumber(total) ? ` of ${short(total)}` : ""}`,
    isNumber(epoch) && `epoch ${short(epoch)}`,
    isNumber(left) && `about ${duration(Math.round(left))} left`,
  ];
  const bar = total > 0 && h("progress", { max: total, value: Math.min(step, total), "aria-label": "steps" });
  return h("div", { class: "progress" }, bar, h("span", null, words.filter(Boolean).join(" · ")));
}

function facts(report) {
  const { dtype, device } = fieldsOf(report.run);
  const { kind, launch } = fieldsOf(report.target);
  const { loss, samples_per_second: pace } = fieldsOf(report.metrics);
  const hosts = listOf(report.hosts).length;
  const all = [
    ["Loss", isNumber(loss) && number(loss)],
    ["Samples per second", isNumber(pace) && number(pace)],
    ["Ranks", known(report.world_size) && [number(report.world_size), hosts ? ` on ${plural(hosts, "host")}` : ""]],
    ["Backend", textOf(report.backend) && h("span", { title: textOf(report.backend_reason) }, report.backend)],
    ["Numbers", [textOf(dtype), device !== "cpu" && textOf(device)].filter(Boolean).join(" on ")],
    ["Target", [textOf(kind), textOf(launch)].filter(Boolean).join(", ")],
    ["Attempt", isNumber(report.attempts) && number(report.attempts)],
    ["All steps", isNumber(seconds(report)) && lasted(seconds(report))],
    ["Written", known(report.time) && moment(report.time)],
  ];
  const shown = all.filter(([, value]) => value);
  return shown.length > 0 && h("dl", { class: "facts" }, shown.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

/** Show what went wrong, or asks for attention: an error, what is left behind, warnings. */
export function problems(report) {
  const error = textOf(report.error);
  const left = listOf(report.left_behind);
  const warnings = listOf(report.warnings);
  return [
    error && h("div", { class: "notice bad", role: "alert" }, h("strong", null, "Error"), h("pre", null, error)),
    left.length > 0 && notice("bad", "Left behind", left),
    warnings.length > 0 && notice("warn", plural(warnings.length, "warning").replace(/^./, (c) => c.toUpperCase()), warnings),
  ];
}

function notice(kind, title, lines) {
  return h("div", { class: `notice ${kind}` }, h("strong", null, title), h("ul", null, lines.map((line) => h("li", null, exact(line)))));
}

function section(title, name, ...children) {
  return h("section", { class: name, "data-key": name }, h("h2", null, title), children);
}

/** Show the steps of the pipeline: one bar, and below it what each took and how it went. */
export function steps(report, tasks) {
  const verbs = Object.entries(fieldsOf(report.verbs)).map(([name, verb]) => ({ name, ...fieldsOf(verb) }));
  const timed = verbs.some((verb) => isNumber(verb.seconds)) ? verbs : tasks;
  const drawn = timed.filter((verb) => verb.seconds > 0);
  const bar = drawn.map((verb) => segment(verb, timed.indexOf(verb)));
  return [
    timed.length > 0 && section("Steps", "steps",
      drawn.length > 0 && h("div", { class: "bar", "aria-hidden": "true" }, bar),
      verbs.length > 0 && table([["Step"], ["Result"], ["Took", "right"], ["", "wide"]], verbs.map(stepRow), { "aria-label": "Steps" })),
    tasks.length > 0 && section("Tasks and logs", "tasks", taskTable(tasks)),
  ];
}

function segment({ name, seconds: took, result, state }, at) {
  const bad = mood(result || state) === "bad" ? " failed" : "";
  return h("span", { class: `part p${at % 8}${bad}`, "--share": took, title: `${name}: ${duration(took)}` }, h("b", null, name));
}

function stepRow(verb, at) {
  const swatch = h("i", { class: `swatch p${at % 8}` });
  return { key: verb.name, cells: [[swatch, verb.name], badge(verb.result), lasted(verb.seconds), textOf(verb.error)] };
}

function taskTable(tasks) {
  const rows = tasks.map((task) => ({
    key: exact(task.name),
    cells: [exact(task.name), badge(task.state), moment(task.start), lasted(task.seconds), textOf(task.href) && link(task.href, "Log", task.onClick)],
  }));
  return table([["Task"], ["State"], ["Began"], ["Took", "right"], ["Log"]], rows, { "aria-label": "Tasks" });
}

const own = (rank) => {
  const { step_seconds: step, wait_seconds: wait } = fieldsOf(rank.pace);
  return isNumber(step) ? step - (isNumber(wait) ? wait : 0) : null;
};

/** Find the rank that the others wait for: it computes longest, whoever waits. */
function slowest(ranks) {
  const timed = ranks.filter((rank) => own(rank) !== null);
  return timed.length < 2 ? null : timed.reduce((most, rank) => (own(rank) > own(most) ? rank : most));
}

/** Say how many ranks met, and how many were asked for. */
function proof(report) {
  const { world_size: world, run } = report;
  const hosts = listOf(report.hosts).length;
  if (!known(world)) return h("p", { class: "proof" }, "No ranks have met.");
  const met = `${plural(world, "rank")} met on ${plural(hosts, "host")}`;
  const [low, high] = String(fieldsOf(run).nnodes ?? 1).split(":").map(Number);
  const each = fieldsOf(run).nproc_per_node ?? 1;
  if (!run || !isNumber(low) || !isNumber(each) || fieldsOf(run).device === "xla") return h("p", { class: "proof" }, `${met}.`);
  const asked = high ? `${low * each} to ${high * each} on ${low} to ${high} were` : `${low * each} on ${low} ${low * each === 1 ? "was" : "were"}`;
  const right = world >= low * each && world <= (high || low) * each;
  return h("p", { class: `proof ${right ? "good" : "bad"}` }, `${met}; ${asked} asked for.`);
}

export function ranksOf(report) {
  const ranks = listOf(report.ranks).map(fieldsOf);
  if (!ranks.length && !known(report.world_size)) return null;
  const last = slowest(ranks);
  const columns = COLUMNS.filter(([, , , optional, has]) => !optional || ranks.some((rank) => known(has(rank))));
  const rows = ranks.map((rank) => ({
    key: exact(rank.rank),
    class: rank === last ? "slowest" : null,
    cells: columns.map(([, , cell]) => cell(rank, rank === last)),
  }));
  const shown = rows.length > 0 && table(columns.map(([title, kind]) => [title, kind]), rows, { "aria-label": "Ranks", class: "scroll tall" });
  return section("Ranks", "ranks", proof(report), last && pointedOut(ranks, last), shown);
}

function pointedOut(ranks, last) {
  const times = ranks.map(own).filter((time) => time !== null).sort((a, b) => a - b);
  const median = (times[(times.length - 1) >> 1] + times[times.length >> 1]) / 2;
  const more = median > 0 ? Math.round((own(last) / median - 1) * 100) : 0;
  const compared = more > 0 ? `${more} % more than the median rank` : "about as long as the others";
  const where = textOf(last.host) ? ` on ${last.host}` : "";
  return h("p", { class: "note" }, `Slowest is rank ${exact(last.rank)}${where}: it computes ${duration(own(last))} in each step, ${compared}.`);
}

const pace = (name) => (rank) => fieldsOf(rank.pace)[name];
const timed = (name) => (rank) => lasted(pace(name)(rank));
const COLUMNS = [
  // title, class, cell, whether it is left out where no rank has it, what it shows
  ["Rank", "right", (rank, last) => [last && h("span", { class: "badge slow" }, "slowest"), number(rank.rank)]],
  ["Host", "", (rank) => textOf(rank.host) || "–"],
  ["Known there as", "", (rank) => textOf(rank.hostname) || "–", true, (rank) => (rank.hostname === rank.host ? null : rank.hostname)],
  ["Cores", "right", (rank) => number(rank.cpus), true, (rank) => rank.cpus],
  ["Threads", "right", (rank) => number(rank.threads), true, (rank) => rank.threads],
  ["Devices", "right", (rank) => number(rank.devices), true, (rank) => rank.devices],
  ["Step", "right", (rank) => number(pace("step")(rank)), true, pace("step")],
  ["Step time", "right", timed("step_seconds"), true, pace("step_seconds")],
  ["of it waiting", "right", timed("wait_seconds"), true, pace("wait_seconds")],
  ["Samples per second", "right", (rank) => number(pace("samples_per_second")(rank)), true, pace("samples_per_second")],
  ["Exit code", "right", (rank) => number(rank.exit_code), true, (rank) => rank.exit_code],
];

export function attempts(report) {
  const ends = listOf(report.history).map(fieldsOf);
  if (!ends.length) return null;
  const rows = ends.map((end, at) => ({ key: at, cells: [number(end.attempt), badge(end.state), lasted(end.seconds), textOf(end.reason)] }));
  return section("Attempts", "attempts", table([["Attempt", "right"], ["End"], ["Took", "right"], ["Why", "wide"]], rows, { "aria-label": "Attempts" }));
}

export function rounds(report) {
  const all = listOf(report.rounds).map(fieldsOf);
  if (all.length < 2) return null;
  const rows = all.map((round, at) => ({ key: at, cells: roundRow(report, all, round, at) }));
  const heads = [["Round", "right"], ["Ranks", "right"], ["Hosts"], ["Began"], ["Took", "right"], ["End"]];
  return section("Rounds", "rounds", table(heads, rows, { "aria-label": "Rounds" }));
}

function roundRow(report, all, round, at) {
  const next = all[at + 1];
  const took = next && next.began > 0 && round.began > 0 ? next.began - round.began : null;
  const change = next && next.world_size !== round.world_size ? ` with ${plural(next.world_size, "rank")}` : "";
  const end = next ? `the ranks met again${change}` : badge(report.state);
  return [number(round.round), number(round.world_size), listOf(round.hosts).map(exact).join(", "), moment(round.began || null), lasted(took), end];
}

export function metricsOf(report) {
  const all = Object.entries(fieldsOf(report.metrics)).sort(([a], [b]) => a.localeCompare(b));
  if (!all.length) return null;
  const rows = all.map(([name, value]) => ({ key: name, cells: [name, h("span", { class: "number", "data-value": exact(value) }, exact(value))] }));
  return section("Metrics", "metrics", table([["Metric"], ["Last value", "right exact"]], rows, { "aria-label": "Metrics", class: "scroll tall" }));
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
    ["Kept for later runs", listOf(report.kept).length > 0 && h("ul", null, listOf(report.kept).map((item) => h("li", null, exact(item))))],
  ];
  const shown = all.filter(([, value]) => value);
  return shown.length > 0 && section("Model and sources", "places", pairs(shown));
}

function bytes(count) {
  if (!isNumber(count)) return "of unknown size";
  const at = count < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(count) / 3));
  return `${Number((count / 1000 ** at).toPrecision(3))} ${["bytes", "kB", "MB", "GB", "TB"][at]}`;
}

const pairs = (all) => h("dl", { class: "pairs" }, all.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));

/** Show what was asked for, and what a function returned. */
export function asked(report) {
  const shown = (fields) => Object.entries(fields).filter(([, value]) => known(value));
  const rows = [...shown(fieldsOf(report.run)), ...shown(fieldsOf(report.target)).map(([name, value]) => [`target.${name}`, value])];
  const value = (each) => (Array.isArray(each) ? each.map(exact).join(" ") : exact(each));
  return [
    rows.length > 0 && folded("What was asked for", "asked", pairs(rows.map(([name, each]) => [name, value(each)]))),
    known(report.returned) && folded("What the function returned", "returned", h("pre", null, JSON.stringify(report.returned, null, 2))),
  ];
}

const folded = (title, name, ...children) => h("details", { class: name, "data-key": name }, h("summary", null, h("h2", null, title)), children);
