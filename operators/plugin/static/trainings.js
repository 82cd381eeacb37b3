// Which trainings a DAG run holds, and what is known of each: pure, but for the values that are asked for.

import { ApiError, ask, askAll, path } from "./api.js";

const LIVE = "manycpu_live";
export const REPORT = "manycpu_report";
const KEYS = "manycpu_"; // what the names of our XComs begin with
const WHOLE = /^(@task\.manycpu|WholeRunOperator)$/; // a training in one task
const NOT_BEGUN = [null, "scheduled", "queued"];
export const GOES_ON = ["queued", "running"]; // of a DAG run
export const UNDER_WAY = ["running", "pending"]; // of a training
const MOST = 300; // documents of a DAG's history, of each kind
const AT_ONCE = 6; // requests: what a browser asks of one host at a time anyway

/** List the names of a DAG's tasks that are ours. */
export async function ourTasks(dag, signal) {
  const { tasks } = await ask(`${path("dags", dag)}/tasks`, {}, signal);
  return new Set(tasks.filter((task) => task.class_ref?.module_path?.startsWith("manycpu.")).map((task) => task.task_id));
}

/** List the XComs that are ours of a DAG run: documents, and the links of our tasks. */
export const xcomsOf = (dag, run, signal) => xcoms(dag, run, { xcom_key_prefix_pattern: KEYS }, signal);

/** List the documents of a DAG's runs of a span of time, the newest first. */
export async function documentsOf(dag, from, to, signal) {
  const query = { run_after_gte: from, run_after_lte: to, order_by: "-run_after" };
  const both = [LIVE, REPORT].map((xcom_key) => xcoms(dag, "~", { ...query, xcom_key }, signal, MOST));
  return (await Promise.all(both)).flat();
}

const xcoms = (dag, run, query, signal, most) =>
  askAll(`${path("dags", dag, "dagRuns", run, "taskInstances")}/~/xcomEntries`, query, "xcom_entries", signal, most);

/** Values of XComs, which are asked for once each time that they have changed. */
export class Documents {
  #known = new Map();

  /** Give each entry its `document`; null where there is none in Airflow's database. */
  async read(entries, signal) {
    const wanted = entries.filter((entry) => entry.key === LIVE || entry.key === REPORT);
    const queue = wanted.filter((entry) => this.#known.get(name(entry))?.timestamp !== entry.timestamp);
    const workers = Array.from({ length: AT_ONCE }, async () => {
      for (let entry = queue.pop(); entry; entry = queue.pop()) await this.#ask(entry, signal);
    });
    await Promise.all(workers);
    return wanted.flatMap((entry) => this.#known.get(name(entry))?.found ?? []);
  }

  async #ask(entry, signal) {
    const { dag_id: dag, run_id: run, task_id: task, map_index, key, timestamp } = entry;
    const below = path("dags", dag, "dagRuns", run, "taskInstances", task, "xcomEntries", key);
    try {
      const { value } = await ask(below, { map_index }, signal);
      this.#known.set(name(entry), { timestamp, found: [{ ...entry, document: parsed(value) }] });
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) throw error;
      this.#known.delete(name(entry)); // cleared since it was listed
    }
  }
}

/**
 * Sort what is known by training.
 *
 * @param tasks task instances that are ours, as Airflow describes them.
 * @param documents entries of XComs with their `document`.
 * @returns [{name, document, elsewhere, tasks}], by name; `elsewhere`: there is a document, but not here.
 */
export function trainings(tasks, documents) {
  const groups = new Map();
  const group = (key) => groups.get(key) ?? groups.set(key, { tasks: [], documents: [] }).get(key);
  const byId = new Map(tasks.map((task) => [id(task), task]));
  for (const task of tasks) group(groupOf(task)).tasks.push(task);
  for (const entry of documents) {
    const task = byId.get(id(entry)) ?? entry;
    if (!isOfEarlierTry(task, entry)) group(groupOf(task)).documents.push(entry);
  }
  return [...groups].flatMap(([key, found]) => split(key, found)).sort(byName);
}

/** Take back that a training goes on where its DAG run has ended: nobody was left to say how it went. */
export function settled(document, state) {
  if (!UNDER_WAY.includes(document?.state) || GOES_ON.includes(state)) return document;
  const reason = "The DAG run has ended; this is what was last heard of the training.";
  return { ...document, state: "ended", reason };
}

/** Take the newer one of a training's documents. */
function newest(documents) {
  return documents.reduce((one, other) => (Date.parse(one.timestamp) > Date.parse(other.timestamp) ? one : other));
}

/** Make one training of a group, or several where it holds several: tasks beside each other in one group of tasks. */
function split(key, { tasks, documents }) {
  const [prefix, index] = JSON.parse(key);
  const byKey = Map.groupBy(documents, (entry) => entry.document?.key ?? prefix);
  if (byKey.size < 2) return [training(prefix || documents[0]?.task_id || "training", index, tasks, documents)];
  return [...byKey.values()].map((own) => {
    const ids = new Set(own.map((entry) => entry.task_id));
    return training(own[0].task_id, index, tasks.filter((task) => ids.has(task.task_id)), own);
  });
}

function training(label, index, tasks, documents) {
  const name = index < 0 ? label : `${label}[${index}]`;
  const readable = documents.filter((entry) => entry.document);
  const document = readable.length ? newest(readable).document : null;
  return { name, document, elsewhere: documents.length > 0 && !document, tasks };
}

/** A task that is to run again still has what it said at its earlier try; one that is deferred does not run again. */
function isOfEarlierTry(task, entry) {
  return "state" in task && (entry.key === REPORT ? NOT_BEGUN : [null]).includes(task.state);
}

/** Name the group of tasks that a task shares a training with. */
export function groupOf(task) {
  const whole = WHOLE.test(task.operator_name ?? "") || WHOLE.test(task.operator ?? "");
  const prefix = whole ? task.task_id : task.task_id.slice(0, Math.max(0, task.task_id.lastIndexOf(".")));
  return JSON.stringify([prefix, task.map_index]);
}

function parsed(value) {
  try {
    const document = typeof value === "string" ? JSON.parse(value) : value;
    return document && typeof document === "object" && !Array.isArray(document) ? document : null;
  } catch {
    return null; // what a backend for XComs has put in its place
  }
}

const id = (of) => JSON.stringify([of.task_id, of.map_index]);
const name = (entry) => JSON.stringify([entry.run_id, entry.task_id, entry.map_index, entry.key]);
const byName = (one, other) => one.name.localeCompare(other.name, undefined, { numeric: true });
