"""Write docs/reliability.md from the results of `make faults`: ``python docs/reliability.py``."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent
FAULTS: Final = DOCS.parent / "tests" / "faults"
BUGS: Final = FAULTS / "planted"
HEAD: Final = """# Reliability

Trainings run for days on machines that fail. This page says what manycpu promises then, how that is
tested, and what the last tests found. `make docs` writes the figures, from the results that `make faults`
keeps in `tests/faults/results.json`.

## What is promised

- **Work is done once.** A command that was killed, and typed again with the same `--run-id`, attaches to
  the training that runs, or exports the model of the one that succeeded. It does not train a second time.
  (A command that is typed again after a green one trains again: it says so, and replaces the model.)
- **A failure is never shown as a success.** A command succeeds only if the whole model that this training
  wrote is there. A rank that fails, a time budget that is used up, and a supervisor that is gone are
  failures.
- **Every command ends**, with a message that says what to do, and never with a traceback.
- **Nothing is left.** After a green run, only the output is left, and what later runs reuse.
- **Nothing of others is touched**, not even under a similar name, or under the same name a moment later.
- **A retry resumes** from the checkpoints of all ranks.
- **A training is protected** from `manycpu clean` for as long as its time budgets allow.
- **One lost answer costs nothing**: a request that fails once is sent again.

## How it is tested

A **trial** is one command that meets one fault. Then the same command, without a fault, must put everything
in order. A **judge** (`tests/support/fault_judge.py`) compares what is left with what the command leaves
without faults: trainings, model, lines shown, report, files, processes, objects of the cluster, objects,
runs and files of others. It reads these itself, and does not ask manycpu for them.

- **Crashes**: SIGKILL before and after each change of a file, and each process that is started, of the
  command, of its supervisor, and of the programs of helper pods; on the cluster, before each request that
  changes something, and after it took effect.
- **Errors**: each change of a file fails once (no space, an input/output error, no permission, a short
  write); each request fails once (the connection is reset before or after the request took effect, or in
  the middle of the answer; the answer is an error; a watch ends; a log is silent; an object is replaced
  just before it is deleted).
- **Harmless faults**: a pod of another user is deleted, a ConfigMap of another user is changed, the API
  server is slow, the clock of the command or of its supervisor jumps by three days. They must change
  nothing: no second command, no further attempt, no line of output more.
- **Loss of power**: a command is killed, and so is its training. What the command wrote and did not sync is
  zeros.
- **A training that fails**: its command meets the faults, and the next one resumes from the checkpoints.
- **Interleavings**: a `run` waits at a request until another command on the same run (`run`, `clean` or
  `cancel`) has ended. Never may two trainings of a run work at the same time.
- **Clocks**: after a crash, the clock jumps by three days, ahead or back, before the command is typed again.

**Under Airflow** ("tasks of a DAG run" in the table), a worker or a triggerer meets the fault, and then the
scheduler tries the task again, or another triggerer takes over. States, tries, XComs and triggers are
Airflow's own, in a database (`tests/scripts/dag_runs.py`). If the DAG run failed, it is cleared once.

Where the table says local, commands, supervisors and ranks are real processes of one machine. Elsewhere the
cluster is simulated: the API server and the operators are a test's own, pods are processes, and volumes are
folders (`tests/support/simulated_cluster.py`). With a claim that is given, data goes through the API server;
with a claim of its own, straight to the pods.

**On a real cluster** ([test cluster](test-cluster.md)), `make campaign` has three users at once. Each
types `manycpu run`, meets faults that a seed draws, and types it again until it is green. Ranks tell a server
outside what they do. A judge (`tests/support/campaign_judge.py`) reads that history alone: one training at a
time, resumed from the last checkpoint, green only with the model that the last rank 0 wrote and the right sum
over all steps, objects of similar names untouched, nothing left, every command ended within 600 s after all
was healed, and no command failed unless a fault struck that may harm it. Among the faults, nodes are drained,
their pods are cut off from the network, volumes fill, and API server, etcd and operators stop for a time.

These trials do not show what happens when the clock of a whole cluster jumps, or an Airflow with several
schedulers loses them.
Other tests cover some of that, without a campaign.
"""
FIGURES: Final = """
## Figures

"Possible" counts every fault at every place where it fits. Only some of these are tried, drawn by seed. A
fault that did not strike, because the command came to its end before, is no evidence.

| command, target, faults | possible | trials | faults struck | violations |
| --- | ---: | ---: | ---: | ---: |
"""
CLUSTER: Final = """
## On a real cluster

A trial is a run of one user. It counts only with evidence that a fault struck: {trials} of {all} runs do.
Violations: {violations} (mended since: {mended}).

- Seeds, each with its commit: {seeds}
- Runs of each kind: {runs}

| fault | struck |
| --- | ---: |
"""
PLANTED: Final = """
## Planted bugs

A judge that finds nothing may not look where the fault is. So bugs are planted into copies of the product
(`tests/faults/planted/`), and at most 60 trials, drawn by seed, must find each. The first trial is without a
fault: a bug that it finds shows even without one. Numbers of places are those of the version that was tried.

| bug | found by trial | with the fault |
| --- | ---: | --- |
"""


def page() -> str:
    """Format all results."""
    results = json.loads((FAULTS / "results.json").read_text())
    planted = {bug: each for bug, each in results["planted"].items() if (BUGS / f"{bug}.diff").exists()}
    found = sum("fault" in figures for figures in planted.values())
    last = f"\nFound: {found} of {len(planted)}.\n"
    simulated = FIGURES + "".join(_campaigns(results["campaigns"]))
    real = "".join(_cluster(results["cluster"]))
    return HEAD + simulated + real + PLANTED + "".join(_bugs(planted)) + last


def _campaigns(results: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    names = ("points", "trials", "struck", "violations")
    total = {name: sum(figures[name] for figures in results.values()) for name in names}
    for title, figures in [*sorted(results.items()), ("**all**", total)]:
        yield f"| {title} | {' | '.join(f'{figures[name]:,}' for name in names)} |\n"


def _cluster(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Add up the campaigns of all seeds."""
    runs, struck = Counter[str](), Counter[str]()
    for figures in results.values():
        runs.update(figures["runs"])
        struck.update(figures["struck"])
    yield CLUSTER.format(
        seeds=", ".join(f"{seed} ({figures['commit']})" for seed, figures in sorted(results.items())),
        violations=sum(figures["violations"] for figures in results.values()),
        mended="; ".join(figures["mended"] for figures in results.values() if "mended" in figures),
        trials=sum(figures["trials"] for figures in results.values()),
        all=runs.total(),
        runs=", ".join(f"{kind} {number}" for kind, number in sorted(runs.items())),
    )
    for fault, number in sorted(struck.items()):
        yield f"| {fault} | {number} |\n"


def _bugs(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, figures in sorted(results.items()):
        what = (FAULTS / "planted" / f"{name}.diff").read_text().splitlines()[1].removesuffix(".")
        fault = f"`{figures['fault']}`" if "fault" in figures else "not found"
        yield f"| {what} | {figures['trials']} | {fault} |\n"


if __name__ == "__main__":
    (DOCS / "reliability.md").write_text(page())
