// Find the trainings of a DAG run and the document of each; pure functions except for the requests.

import { ApiError, ask, askAll, path } from "./api.js";

const LIVE = "manycpu_live";
export const REPORT = "manycpu_report";
const KEY_PREFIX = "manycpu_"; // of the XComs of manycpu
const WHOLE_RUN = /^(@task\.manycpu|WholeRunOperator)$/; // operators that do a training in one task
const NOT_BEGUN = [null, "scheduled", "queued"];
export const ACTIVE_RUN_STATES = ["queued", "running"]; // of a DAG run
export const ACTIVE_TRAINING_STATES = ["running", "pending"]; // of a training
const MAX_DOCUMENTS = 300; // of a DAG's history, of each kind
const MAX_REQUESTS = 6; // at once: the limit of browsers for one host

/** Map the names of a DAG's tasks with an operator of manycpu to the names of their operators. */
export async function ourTasks(dag, signal) {
  const { tasks } = await ask(`${path("dags", dag)}/tasks`, {}, signal);
  const own = tasks.filter((task) => task.class_ref?.module_path?.startsWith("manycpu."));
  return new Map(own.map((task) => [task.task_id, task.operator_name]));
}

/** List the XComs of manycpu in a DAG run: documents, and the links of tasks. */
export const xcomsOf = (dag, run, signal) => xcoms(dag, run, { xcom_key_prefix_pattern: KEY_PREFIX }, signal);

/** List the documents of a DAG's runs within a span of time, the newest first. */
export async function documentsOf(dag, from, to, signal) {
  const query = { run_after_gte: from, run_after_lte: to, order_by: "-run_after" };
  const both = [LIVE, REPORT].map((xcom_key) => xcoms(dag, "~", { ...query, xcom_key }, signal, MAX_DOCUMENTS));
  return (await Promise.all(both)).flat();
}

const xcoms = (dag, run, query, signal, most) =>
  askAll(`${path("dags", dag, "dagRuns", run, "taskInstances")}/~/xcomEntries`, query, "xcom_entries", signal, most);

/** Values of XComs, each requested once after every change. */
export class Documents {
  #known = new Map();

  /** Add the `document` to each entry; null if it is not in Airflow's database. */
  async read(entries, signal) {
    const wanted = entries.filter((entry) => entry.key === LIVE || entry.key === REPORT);
    const queue = wanted.filter((entry) => this.#known.get(name(entry))?.timestamp !== entry.timestamp);
    const workers = Array.from({ length: MAX_REQUESTS }, async () => {
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
 * Group tasks and documents by training.
 *
 * @param tasks task instances of manycpu, as the REST API describes them.
 * @param documents entries of XComs with their `document`; without their tasks, with the `operator_name` of these.
 * @returns [{name, document, elsewhere, tasks}], by name; `elsewhere`: the document is in a custom XCom backend.
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

/** Mark an active training as ended if its DAG run has ended: its last task was killed before it could. */
export function settled(document, state) {
  if (!ACTIVE_TRAINING_STATES.includes(document?.state) || ACTIVE_RUN_STATES.includes(state)) return document;
  const reason = "The DAG run has ended; this is the last data of the training.";
  return { ...document, state: "ended", reason };
}

/** Return the newest of a training's documents. */
function newest(documents) {
  return documents.reduce((one, other) => (Date.parse(one.timestamp) > Date.parse(other.timestamp) ? one : other));
}

/** Make one training of a group, or several: a task group may hold tasks of several trainings. */
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

/** Whether a document is of an earlier try: of a task that is to run again; a deferred task is not. */
function isOfEarlierTry(task, entry) {
  return "state" in task && (entry.key === REPORT ? NOT_BEGUN : [null]).includes(task.state);
}

/** Return the key of the group of tasks that belong to the same training as a task. */
export function groupOf(task) {
  const whole = WHOLE_RUN.test(task.operator_name ?? "") || WHOLE_RUN.test(task.operator ?? "");
  const prefix = whole ? task.task_id : task.task_id.slice(0, Math.max(0, task.task_id.lastIndexOf(".")));
  return JSON.stringify([prefix, task.map_index]);
}

function parsed(value) {
  try {
    const document = typeof value === "string" ? JSON.parse(value) : value;
    return document && typeof document === "object" && !Array.isArray(document) ? document : null;
  } catch {
    return null; // a custom XCom backend stores a reference instead
  }
}

const id = (of) => JSON.stringify([of.task_id, of.map_index]);
const name = (entry) => JSON.stringify([entry.run_id, entry.task_id, entry.map_index, entry.key]);
const byName = (one, other) => one.name.localeCompare(other.name, undefined, { numeric: true });
