// The two tabs: of a DAG run with its training, and of a DAG with all of its trainings. Written by hand, not built.
// Airflow provides React and its router. ../page/training.js, which does not know Airflow, draws the content.

import { openHistory } from "./history.js";
import { openRun } from "./run.js";

const { createElement, useEffect, useRef } = globalThis.React;
const { useNavigate } = globalThis.ReactRouterDOM;

/** Make a component that calls `open(element, ids, go)` when it is mounted, and the returned function at its end. */
const component = (open) =>
  function ManycpuTab({ dagId, runId }) {
    const element = useRef(null);
    const navigate = useRef(null);
    navigate.current = useNavigate();
    useEffect(
      () => open(element.current, { dag: dagId, run: runId }, (...to) => navigate.current(...to)),
      [dagId, runId],
    );
    return createElement("div", { ref: element, className: "manycpu-tab" });
  };

// Airflow reads a global variable with the tab's name, and loads the bundle once for both tabs.
globalThis.Training = component(openRun);
globalThis.Trainings = component(openHistory);
