// The tab of a DAG run: its trainings, one at a time, while they go on.

import { mount } from "../page/training.js";
import { ask, askAll, path } from "./api.js";
import { follow } from "./follow.js";
import { Documents, GOES_ON, ourTasks, settled, trainings, UNDER_WAY, xcomsOf } from "./trainings.js";
import { Drawing, element, link, Note, seconds } from "./view.js";

const EVERY = 5_000; // milliseconds between two looks
const SECOND = 1_000; // after so many milliseconds what is shown is older
const CHOICE = "training"; // in the address: it stays when the page is loaded again

/** Show a DAG run's trainings in an element; returns what ends it. */
export function openRun(root, ids, go) {
  const view = new RunView(root, ids, go);
  const end = follow((signal) => view.look(signal), (error, wait) => view.trouble(error, wait), EVERY);
  const clock = setInterval(() => view.age(), SECOND);
  return () => {
    clearInterval(clock);
    end();
    view.destroy();
  };
}

class RunView {
  #documents = new Documents();
  #ours = null; // names of our tasks: they stay the same for a run
  #shown = [];
  #goesOn = false;

  constructor(root, { dag, run }, go) {
    Object.assign(this, { dag, run, go });
    this.root = root;
    this.note = new Note(root);
    this.selector = new Selector(root, () => this.draw());
    const stage = element("div");
    root.append(stage);
    this.drawing = new Drawing(stage, mount);
  }

  /** Ask for what has changed, and draw it; returns whether the run goes on. */
  async look(signal) {
    const run = path("dags", this.dag, "dagRuns", this.run);
    const { state } = await ask(run, {}, signal); // first: of a run that has ended, all is there
    const [tasks, entries, ours] = await Promise.all([
      askAll(`${run}/taskInstances`, {}, "task_instances", signal),
      xcomsOf(this.dag, this.run, signal),
      this.#ours ?? ourTasks(this.dag, signal),
    ]);
    this.#ours = ours;
    const marked = new Set([...ours, ...entries.map((entry) => entry.task_id)]);
    const own = tasks.filter((task) => marked.has(task.task_id)).sort(byStart);
    const found = own.length ? trainings(own, await this.#documents.read(entries, signal)) : [];
    this.#shown = found.map((training) => ({ ...training, document: settled(training.document, state) }));
    this.#goesOn = GOES_ON.includes(state);
    this.draw();
    return this.#goesOn;
  }

  /** Draw the training that is chosen. */
  draw() {
    const training = this.selector.choose(this.#shown);
    if (!training) {
      this.note.say("No task of this DAG run is one of manycpu's: there is no training to show.");
      return this.drawing.clear();
    }
    this.note.say(sentence(training));
    const tasks = mattering(training).map((task) => this.row(task));
    const report = { name: training.name, ...training.document };
    return this.drawing.update({ report, tasks, now: this.#goesOn ? Date.now() / 1000 : undefined });
  }

  /** Let what is shown become older, while there may be news. */
  age() {
    if (this.#goesOn && document.visibilityState !== "hidden") this.drawing.age(Date.now() / 1000);
  }

  /** Describe a task as the page shows it; its name leads to its log. */
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

/** A choice among trainings, where there are several. */
class Selector {
  constructor(root, changed) {
    this.select = element("select", { onchange: () => this.keep(changed) });
    this.label = element("label", { className: "manycpu-choice", hidden: true }, "Training ", this.select);
    root.append(this.label);
  }

  /** Return the training that is chosen, else the one that was shown, goes on, or is the first. */
  choose(all) {
    const names = all.map((training) => training.name);
    const wanted = new URLSearchParams(location.search).get(CHOICE);
    const named = (name) => all.find((training) => training.name === name);
    const shown = this.shown?.document && named(this.shown.name);
    const chosen = named(wanted) ?? shown ?? all.find(goesOn) ?? all[0];
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
const goesOn = (training) => UNDER_WAY.includes(training.document?.state);

/** List the tasks that say something: after a refusal the others only say that there was nothing to do. */
function mattering({ document, tasks }) {
  const refused = document?.state === "failed" && !document.key; // there is no run yet that could have one
  const last = refused ? tasks.findIndex((task) => task.state === "failed") : -1;
  return last < 0 ? tasks : tasks.slice(0, last + 1);
}

function sentence({ document, elsewhere, tasks }) {
  if (elsewhere) return "What is known of this training is where the backend for XComs puts it, not in Airflow's database.";
  if (document) return "";
  const ended = tasks.every((task) => task.state !== null && task.end_date !== null);
  if (ended) return "It ended without having told of a training; the logs of its tasks say why.";
  return "The training has told nothing yet; this is what its tasks do.";
}
