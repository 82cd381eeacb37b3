// The tab of a DAG: its trainings, the newest first.

import { mountHistory } from "../page/training.js";
import { ask, path } from "./api.js";
import { follow } from "./follow.js";
import { Documents, documentsOf, GOES_ON, groupOf, ourTasks, REPORT, settled, trainings } from "./trainings.js";
import { Drawing, element, link, Note, seconds } from "./view.js";

const EVERY = 15_000; // milliseconds between two looks
const PAGE = 50; // runs at a time
// As Airflow makes ids itself: the kind of run, a moment, and letters by chance where that is not enough.
const MADE = /^([a-z]+)(?:_[a-z]+)*__(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d))(?:_\w+)?$/;
const of = (entry) => `${entry.run_id} ${groupOf(entry)}`;

/** Make short names of ids: kind and moment of those that Airflow made, by the reader's clock; never one twice. */
export function shortNames(ids) {
  const ways = [toTheSecond, toTheMillisecond].map((way) => {
    const names = ids.map(way);
    return (at) => (names.filter((name) => name === names[at]).length === 1 ? names[at] : null);
  });
  return new Map(ids.map((id, at) => [id, ways[0](at) ?? ways[1](at) ?? id]));
}

const toTheMillisecond = (id) => toTheSecond(id) + (/\.\d{1,3}/.exec(id)?.[0] ?? "");

function toTheSecond(id) {
  const [, kind, at] = MADE.exec(id) ?? [];
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return id;
  const two = (part) => String(part).padStart(2, "0");
  const hour = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
  return `${kind} ${two(date.getMonth() + 1)}-${two(date.getDate())} ${hour}`;
}

/** Show a DAG's trainings in an element; returns what ends it. */
export function openHistory(root, ids, go) {
  const view = new HistoryView(root, ids, go);
  const begin = () => follow((signal) => view.look(signal), (error, wait) => view.trouble(error, wait), EVERY);
  let end = begin();
  view.more.onclick = () => {
    end();
    view.wanted += PAGE;
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
  wanted = PAGE;

  constructor(root, { dag }, go) {
    Object.assign(this, { dag, go, root });
    this.note = new Note(root);
    const stage = element("div");
    this.more = element("button", { type: "button", className: "manycpu-more", hidden: true }, "Show more");
    root.append(stage, this.more);
    this.drawing = new Drawing(stage, mountHistory);
  }

  /** Ask for what has changed, and draw it; returns whether a run goes on. */
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
    return runs.list.some((run) => GOES_ON.includes(run.state));
  }

  async #runs(signal) {
    const list = [];
    for (;;) {
      const limit = Math.min(PAGE, this.wanted - list.length);
      const query = { order_by: "-run_after", limit, offset: list.length };
      const answer = await ask(`${path("dags", this.dag)}/dagRuns`, query, signal);
      list.push(...answer.dag_runs);
      if (!answer.dag_runs.length || list.length >= Math.min(this.wanted, answer.total_entries)) {
        return { list, all: answer.total_entries };
      }
    }
  }

  /** Read what the runs' trainings said: of one that has ended its report, of one that goes on what is known. */
  async #read(runs, signal) {
    if (!runs.length) return [];
    const dates = runs.map((run) => run.run_after).sort();
    const entries = await documentsOf(this.dag, dates[0], dates.at(-1), signal);
    const ended = new Set(runs.filter((run) => !GOES_ON.includes(run.state)).map((run) => run.dag_run_id));
    const reported = new Set(entries.filter((entry) => entry.key === REPORT).map(of));
    const needed = (entry) => entry.key === REPORT || !(ended.has(entry.run_id) && reported.has(of(entry)));
    return this.#documents.read(entries.filter(needed), signal);
  }

  /** Make a row of each training of a DAG run; of a run that did not get as far, one without a document. */
  #rows(run, short, documents) {
    const start = seconds(run.start_date);
    const end = seconds(run.end_date) ?? Date.now() / 1000;
    const own = trainings([], documents.filter((entry) => entry.run_id === run.dag_run_id));
    return (own.length ? own : [{ name: "", document: null }]).map(({ name, document: told }) => {
      const document = settled(told, run.state);
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
