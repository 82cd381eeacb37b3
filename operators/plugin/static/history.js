// The tab of a DAG: its trainings, the newest first.

import { mountHistory } from "../page/training.js";
import { ask, path } from "./api.js";
import { follow } from "./follow.js";
import { ACTIVE_RUN_STATES, Documents, documentsOf, groupOf, ourTasks, REPORT, settled, trainings } from "./trainings.js";
import { Drawing, element, link, Note, seconds } from "./view.js";

const POLL_INTERVAL_MS = 15_000;
const PAGE_SIZE = 50; // DAG runs
// An id that Airflow made: the type of the run, a time, and random letters if the time is not unique.
const GENERATED_ID = /^([a-z]+)(?:_[a-z]+)*__(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d))(?:_\w+)?$/;
const of = (entry) => `${entry.run_id} ${groupOf(entry)}`;

/** Make unique short names of ids: type and local time of those that Airflow made, others as they are. */
export function shortNames(ids) {
  const ways = [toTheSecond, toTheMillisecond].map((way) => {
    const names = ids.map(way);
    return (at) => (names.filter((name) => name === names[at]).length === 1 ? names[at] : null);
  });
  return new Map(ids.map((id, at) => [id, ways[0](at) ?? ways[1](at) ?? id]));
}

const toTheMillisecond = (id) => toTheSecond(id) + (/\.\d{1,3}/.exec(id)?.[0] ?? "");

function toTheSecond(id) {
  const [, kind, at] = GENERATED_ID.exec(id) ?? [];
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return id;
  const two = (part) => String(part).padStart(2, "0");
  const hour = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
  return `${kind} ${two(date.getMonth() + 1)}-${two(date.getDate())} ${hour}`;
}

/** Show a DAG's trainings in an element; returns a function that closes the tab. */
export function openHistory(root, ids, go) {
  const view = new HistoryView(root, ids, go);
  const begin = () => follow((signal) => view.look(signal), (error, wait) => view.trouble(error, wait), POLL_INTERVAL_MS);
  let end = begin();
  view.more.onclick = () => {
    end();
    view.wanted += PAGE_SIZE;
    end = begin();
  };
  return () => {
    end();
    view.destroy();
  };
}

class HistoryView {
  #documents = new Documents();
  #ours = null;
  wanted = PAGE_SIZE;

  constructor(root, { dag }, go) {
    Object.assign(this, { dag, go, root });
    this.note = new Note(root);
    const stage = element("div");
    this.more = element("button", { type: "button", className: "manycpu-more", hidden: true }, "Show more");
    root.append(stage, this.more);
    this.drawing = new Drawing(stage, mountHistory);
  }

  /** Request what has changed, and draw it; returns whether a run is active. */
  async look(signal) {
    const [ours, runs] = await Promise.all([this.#ours ?? ourTasks(this.dag, signal), this.#runs(signal)]);
    this.#ours = ours;
    const documents = await this.#read(runs.list, signal);
    if (!ours.size && !documents.length) {
      this.note.say("No task of this DAG is one of manycpu's: there is no training to show.");
      this.drawing.clear();
      return false;
    }
    this.note.say(runs.list.length ? "" : "This DAG has not run yet.");
    const names = shortNames(runs.list.map((run) => run.dag_run_id));
    const rows = runs.list.flatMap((run) => this.#rows(run, names.get(run.dag_run_id), documents));
    this.drawing.update(rows);
    this.more.hidden = runs.list.length >= runs.all;
    return runs.list.some((run) => ACTIVE_RUN_STATES.includes(run.state));
  }

  async #runs(signal) {
    const list = [];
    for (;;) {
      const limit = Math.min(PAGE_SIZE, this.wanted - list.length);
      const query = { order_by: "-run_after", limit, offset: list.length };
      const answer = await ask(`${path("dags", this.dag)}/dagRuns`, query, signal);
      list.push(...answer.dag_runs);
      if (!answer.dag_runs.length || list.length >= Math.min(this.wanted, answer.total_entries)) {
        return { list, all: answer.total_entries };
      }
    }
  }

  /** Read the documents of the runs' trainings: the report of an ended one, the live document of an active one. */
  async #read(runs, signal) {
    if (!runs.length) return [];
    const dates = runs.map((run) => run.run_after).sort();
    const found = await documentsOf(this.dag, dates[0], dates.at(-1), signal);
    const entries = found.map((entry) => ({ ...entry, operator_name: this.#ours.get(entry.task_id) }));
    const ended = new Set(runs.filter((run) => !ACTIVE_RUN_STATES.includes(run.state)).map((run) => run.dag_run_id));
    const reported = new Set(entries.filter((entry) => entry.key === REPORT).map(of));
    const needed = (entry) => entry.key === REPORT || !(ended.has(entry.run_id) && reported.has(of(entry)));
    return this.#documents.read(entries.filter(needed), signal);
  }

  /** Make a row for each training of a DAG run; a run without trainings has one row without a document. */
  #rows(run, short, documents) {
    const start = seconds(run.start_date);
    const end = seconds(run.end_date) ?? Date.now() / 1000;
    const own = trainings([], documents.filter((entry) => entry.run_id === run.dag_run_id));
    return (own.length ? own : [{ name: "", document: null }]).map(({ name, document: stored }) => {
      const document = settled(stored, run.state);
      const query = own.length > 1 ? `?${new URLSearchParams({ training: name })}` : "";
      return {
        id: own.length > 1 ? `${run.dag_run_id} ${name}` : run.dag_run_id,
        name: own.length > 1 ? `${short} ${name}` : short,
        start,
        seconds: start === null ? null : Math.max(0, end - start),
        state: document?.state ?? run.state,
        document: document ?? {},
        ...link(`${path("dags", this.dag, "runs", run.dag_run_id)}/plugin/training${query}`, this.go),
      };
    });
  }

  trouble(error, wait) {
    if (error.lasting) {
      this.drawing.clear();
      this.more.hidden = true;
    }
    this.note.tell(error, wait, "this DAG's trainings");
  }

  destroy() {
    this.drawing.destroy();
    this.root.replaceChildren();
  }
}
