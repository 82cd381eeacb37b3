// The two tabs: of a DAG run, the training as it goes; of a DAG, those that were. Written by hand, not built. React and
// its router are the host's; all that is drawn is drawn by ../page/training.js, which knows nothing of Airflow.

import { openHistory } from "./history.js";
import { openRun } from "./run.js";

const { createElement, useEffect, useRef } = globalThis.React;
const { useNavigate } = globalThis.ReactRouterDOM;

/** Make a component that hands its element to `open(element, ids, go)`, which returns what is called at the end. */
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

// Airflow asks for a global of the tab's name, and loads the bundle once for both.
globalThis.Training = component(openRun);
globalThis.Trainings = component(openHistory);
