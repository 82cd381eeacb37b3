"""A job of 512 pods, a warning about each: CPU time that judging it takes for what wakes its follower."""

import time
from collections.abc import Callable
from typing import Any

from bench._measure import rounds, spread

PODS = 512
NOW = 60.0  # seconds after the job's creation
WORDS = {
    "title": "Following a job of 512 pods",
    "meaning": "A follower of a very large job spends milliseconds on each event of the job.",
    "figures": {
        r"(a .+)": (r"Processor time for \1", "ms", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure, in one process; the time of the process, not of the clock."""
    from support.api_objects import T0, container, event, job, pod, snapshot

    from manycpu.pipeline.spec.training_run import TrainingRun
    from manycpu.pipeline.targets.kubernetes.following import judgement
    from manycpu.pipeline.targets.kubernetes.following.judgement import RankActivity, budgets

    waiting = container(waiting={"reason": "ContainerCreating"})
    pods = [pod(f"qa-1-worker-{number:03}", containerStatuses=[waiting]) for number in range(PODS)]
    job_snapshot = snapshot(
        job("Created"),
        pods,
        [event("FailedMount", f"no volume {n}", waiting_pod) for n, waiting_pod in enumerate(pods)],
    )
    run = TrainingRun(program="x", output="/out", nnodes=PODS)

    def change(number: int) -> None:
        changed = pods[number] | {"status": pods[number]["status"] | {"phase": "Running"}}
        job_snapshot.apply("Pod", [changed], [], complete=False)

    def warn(number: int) -> None:
        job_snapshot.apply("Event", [event("BackOff", "again", pods[number], 7)], [], complete=False)

    def measured(wake: Callable[[int], object]) -> dict[str, float]:
        return spread([_milliseconds(wake, number, judge) for number in range(rounds(50, 10))])

    def judge() -> None:
        budgets(run, job_snapshot, RankActivity())
        judgement.judge(run, job_snapshot, RankActivity(), T0 + NOW)

    judge()
    return {
        "unit": "milliseconds of CPU time",
        "a line of a log": measured(lambda _: None),
        "a pod that changes": measured(change),
        "a warning about a pod": measured(warn),
        "a list without news": measured(
            lambda _: job_snapshot.apply("Pod", list(job_snapshot.pods), [], complete=True)
        ),
    }


def _milliseconds(wake: Callable[[int], object], number: int, judge: Callable[[], None]) -> float:
    began = time.process_time()
    wake(number)
    judge()
    return 1e3 * (time.process_time() - began)
