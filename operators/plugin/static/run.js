// The tab of a DAG run: one of its trainings at a time, updated while the run is active.

import { mount } from "../page/training.js";
import { ask, askAll, path } from "./api.js";
import { follow } from "./follow.js";
import { ACTIVE_RUN_STATES, ACTIVE_TRAINING_STATES, Documents, ourTasks, settled, trainings, xcomsOf } from "./trainings.js";
import { Drawing, element, link, Note, seconds } from "./view.js";

const POLL_INTERVAL_MS = 5_000;
const CLOCK_INTERVAL_MS = 1_000; // between updates of the shown age
const CHOICE = "training"; // parameter of the URL, so that a reload keeps the choice

/** Show a DAG run's trainings in an element; returns a function that closes the tab. */
export function openRun(root, ids, go) {
  const view = new RunView(root, ids, go);
  const end = follow((signal) => view.look(signal), (error, wait) => view.trouble(error, wait), POLL_INTERVAL_MS);
  const clock = setInterval(() => view.age(), CLOCK_INTERVAL_MS);
  return () => {
    clearInterval(clock);
    end();
    view.destroy();
  };
}

class RunView {
  #documents = new Documents();
  #ours = null; // the tasks of manycpu, which do not change during a run
  #shown = [];
  #active = false;

  constructor(root, { dag, run }, go) {
    Object.assign(this, { dag, run, go });
    this.root = root;
    this.note = new Note(root);
    this.selector = new Selector(root, () => this.draw());
    const stage = element("div");
    root.append(stage);
    this.drawing = new Drawing(stage, mount);
  }

  /** Request what has changed, and draw it; returns whether the run is active. */
  async look(signal) {
    const run = path("dags", this.dag, "dagRuns", this.run);
    const { state } = await ask(run, {}, signal); // first: once the run has ended, all documents are there
    const [tasks, entries, ours] = await Promise.all([
      askAll(`${run}/taskInstances`, {}, "task_instances", signal),
      xcomsOf(this.dag, this.run, signal),
      this.#ours ?? ourTasks(this.dag, signal),
    ]);
    this.#ours = ours;
    const marked = new Set([...ours.keys(), ...entries.map((entry) => entry.task_id)]);
    const own = tasks.filter((task) => marked.has(task.task_id)).sort(byStart);
    const found = own.length ? trainings(own, await this.#documents.read(entries, signal)) : [];
    this.#shown = found.map((training) => ({ ...training, document: settled(training.document, state) }));
    this.#active = ACTIVE_RUN_STATES.includes(state);
    this.draw();
    return this.#active;
  }

  /** Draw the chosen training. */
  draw() {
    const training = this.selector.choose(this.#shown);
    if (!training) {
      this.note.say("No task of this DAG run is one of manycpu's: there is no training to show.");
      return this.drawing.clear();
    }
    this.note.say(sentence(training));
    const tasks = tasksToShow(training).map((task) => this.row(task));
    const report = { name: training.name, ...training.document };
    return this.drawing.update({ report, tasks, now: this.#active ? Date.now() / 1000 : undefined });
  }

  /** Update the age of the shown data, while the run is active. */
  age() {
    if (this.#active && document.visibilityState !== "hidden") this.drawing.age(Date.now() / 1000);
  }

  /** Describe a task for the page; its name is a link to its log. */
  row(task) {
    const mapped = task.map_index < 0 ? "" : `/mapped/${task.map_index}`;
    const start = seconds(task.start_date);
    const end = seconds(task.end_date) ?? Date.now() / 1000;
    return {
      name: task.task_display_name === task.task_id ? task.task_id.split(".").at(-1) : task.task_display_name,
      state: task.state,
      start,
      seconds: start === null ? null : Math.max(0, (task.end_date && task.duration) || end - start),
      ...link(path("dags", this.dag, "runs", this.run, "tasks", task.task_id) + mapped, this.go),
    };
  }

  trouble(error, wait) {
    if (error.lasting) {
      this.selector.choose([]);
      this.drawing.clear();
    }
    this.note.tell(error, wait, "this run's training");
  }

  destroy() {
    this.drawing.destroy();
    this.root.replaceChildren();
  }
}

/** A selector of the training, shown if there are several. */
class Selector {
  constructor(root, changed) {
    this.select = element("select", { onchange: () => this.keep(changed) });
    this.label = element("label", { className: "manycpu-choice", hidden: true }, "Training ", this.select);
    root.append(this.label);
  }

  /** Return the training of the URL, else the one shown before, else one that is active, else the first. */
  choose(all) {
    const names = all.map((training) => training.name);
    const wanted = new URLSearchParams(location.search).get(CHOICE);
    const named = (name) => all.find((training) => training.name === name);
    const shown = this.shown?.document && named(this.shown.name);
    const chosen = named(wanted) ?? shown ?? all.find(isActive) ?? all[0];
    this.shown = chosen;
    if (JSON.stringify(names) !== this.names) {
      this.select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
      this.names = JSON.stringify(names);
    }
    if (chosen) this.select.value = chosen.name;
    this.label.hidden = all.length < 2;
    return chosen;
  }

  keep(changed) {
    const url = new URL(location.href);
    url.searchParams.set(CHOICE, this.select.value);
    history.replaceState(history.state, "", url);
    changed();
  }
}

const byStart = (one, other) => (seconds(one.start_date) ?? Infinity) - (seconds(other.start_date) ?? Infinity) || 0;
const isActive = (training) => ACTIVE_TRAINING_STATES.includes(training.document?.state);

/** List the tasks to show: after a refusal the tasks behind it did nothing. */
function tasksToShow({ document, tasks }) {
  const refused = document?.state === "failed" && !document.key; // no key: the run never began
  const last = refused ? tasks.findIndex((task) => task.state === "failed") : -1;
  return last < 0 ? tasks : tasks.slice(0, last + 1);
}

function sentence({ document, elsewhere, tasks }) {
  if (elsewhere) return "The data of this training is in a custom XCom backend, not in Airflow's database.";
  if (document) return "";
  const ended = tasks.every((task) => task.state !== null && task.end_date !== null);
  if (ended) return "The run ended without data of a training; the logs of its tasks say why.";
  return "There is no data of the training yet; these are its tasks.";
}
