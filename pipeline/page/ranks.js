// The ranks of a run: who they are, the proof of their number in words, and the slowest.
import {
  countOf,
  duration,
  exact,
  fieldsOf,
  h,
  isNumber,
  known,
  lasted,
  listOf,
  number,
  plural,
  section,
  short,
  table,
  textOf,
} from "./dom.js";

const CLEARLY = 1.1; // times as long
const own = (rank) => {
  const { step_seconds: step, wait_seconds: wait } = fieldsOf(rank.pace);
  return isNumber(step) ? step - (isNumber(wait) ? wait : 0) : null;
};

/** Find the rank that the others wait for: it computes longest, and clearly longer than the fastest. */
function slowest(ranks) {
  const timed = ranks.filter((rank) => own(rank) !== null);
  if (timed.length < 2) return null;
  const last = timed.reduce((most, rank) => (own(rank) > own(most) ? rank : most));
  return own(last) > CLEARLY * Math.min(...timed.map(own)) ? last : null;
}

/** Say how many ranks met, and how many were asked for. */
function proof(report) {
  const { world_size: world, run } = report;
  const hosts = countOf(report, "hosts");
  if (!known(world)) return h("p", { class: "proof" }, "No ranks have met.");
  const met = `${plural(world, "rank")} met on ${plural(hosts, "host")}`;
  const [low, high] = String(fieldsOf(run).nnodes ?? 1)
    .split(":")
    .map(Number);
  const each = fieldsOf(run).nproc_per_node ?? 1;
  if (!run || !isNumber(low) || !isNumber(each) || fieldsOf(run).device === "xla")
    return h("p", { class: "proof" }, `${met}.`);
  const asked = high
    ? `${low * each} to ${high * each} on ${low} to ${high} were`
    : `${low * each} on ${low} ${low * each === 1 ? "was" : "were"}`;
  const right = world >= low * each && world <= (high || low) * each;
  return h("p", { class: `proof ${right ? "good" : "bad"}` }, `${met}; ${asked} asked for.`);
}

export function ranksOf(report) {
  const ranks = listOf(report.ranks).map(fieldsOf);
  if (!ranks.length && !known(report.world_size)) return null;
  const last = slowest(ranks);
  const columns = COLUMNS.filter(
    ([, , , optional, has]) => !optional || ranks.some((rank) => known(has(rank))),
  );
  const rows = ranks.map((rank) => ({
    key: exact(rank.rank),
    class: rank === last ? "slowest" : null,
    cells: columns.map(([, , cell]) => cell(rank, rank === last)),
  }));
  const shown =
    rows.length > 0 &&
    table(
      columns.map(([title, kind]) => [title, kind]),
      rows,
      { "aria-label": "Ranks", class: "scroll tall" },
    );
  return section("Ranks", "ranks", proof(report), last && pointedOut(ranks, last), left(report, ranks), shown);
}

/** Say that there are more ranks than those shown. */
function left(report, ranks) {
  const all = countOf(report, "ranks");
  const words = `${short(ranks.length)} of ${plural(all, "rank")} are shown`;
  const which = "those that failed, and others from the fastest to the slowest";
  return all > ranks.length && h("p", { class: "note" }, `${words}: ${which}.`);
}

function pointedOut(ranks, last) {
  const times = ranks
    .map(own)
    .filter((time) => time !== null)
    .sort((a, b) => a - b);
  const median = (times[(times.length - 1) >> 1] + times[times.length >> 1]) / 2;
  const more = median > 0 ? Math.round((own(last) / median - 1) * 100) : 0;
  const compared = more > 0 ? `${more} % more than the median rank` : "about as long as the others";
  const where = textOf(last.host) ? ` on ${last.host}` : "";
  return h(
    "p",
    { class: "note" },
    `Slowest is rank ${exact(last.rank)}${where}: it computes ${duration(own(last))} in each step, ${compared}.`,
  );
}

const pace = (name) => (rank) => fieldsOf(rank.pace)[name];
const timed = (name) => (rank) => lasted(pace(name)(rank));
const COLUMNS = [
  // title, class, cell, whether it is left out where no rank has it, what it shows
  [
    "Rank",
    "",
    (rank, last) => [number(rank.rank), last && " ", last && h("span", { class: "badge slow" }, "slowest")],
  ],
  ["Host", "", (rank) => textOf(rank.host) || "–"],
  [
    "Hostname",
    "",
    (rank) => textOf(rank.hostname) || "–",
    true,
    (rank) => (rank.hostname === rank.host ? null : rank.hostname),
  ],
  ["Cores", "right", (rank) => number(rank.cpus), true, (rank) => rank.cpus],
  ["Threads", "right", (rank) => number(rank.threads), true, (rank) => rank.threads],
  ["Devices", "right", (rank) => number(rank.devices), true, (rank) => rank.devices],
  ["Step", "right", (rank) => number(pace("step")(rank)), true, pace("step")],
  ["Step time", "right", timed("step_seconds"), true, pace("step_seconds")],
  ["Waiting", "right", timed("wait_seconds"), true, pace("wait_seconds")],
  [
    "Samples per second",
    "right",
    (rank) => number(pace("samples_per_second")(rank)),
    true,
    pace("samples_per_second"),
  ],
  ["Exit code", "right", (rank) => number(rank.exit_code), true, (rank) => rank.exit_code],
];
