"""What a success of a job on Kubernetes is believed by: every rank that met last has ended well."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.api_objects import T0, Object, at, container, job, pod, snapshot, with_sidecar

from manycpu.pipeline.observed import Observer
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following.exit_records import are_needed
from manycpu.pipeline.targets.kubernetes.following.judgement import record_exit_codes
from manycpu.pipeline.targets.outcome import outcome

SUCCEEDED = Status(state=RunState.SUCCEEDED)
RUN = TrainingRun.model_validate(
    {"program": "a.py", "output": "o", "nnodes": 2, "max_restarts": 1, "backend": "gloo"}
)


def observed(*ends: tuple[int, int], backend: str | None = "gloo") -> Observed:
    """Hear two ranks that meet, make a process group, and those ends (rank, exit code) of theirs."""
    observer = Observer()

    def says(rank: int, event: str, seconds: float, **fields: Any) -> None:
        line = events.encode(event, rank=rank, host="node", hostname=f"qa-1-worker-{rank}", **fields)
        observer.add_line(RankLine(rank, "node", line), T0 + seconds)

    for rank in (0, 1):
        says(rank, "proof", 10.5, world_size=2, round=0, meeting="m", backend="gloo")
        if backend:
            says(rank, "backend", 11, requested="gloo", observed=backend, world_size=2)
    for rank, code in ends:
        says(rank, "exit", 50, code=code)
    return observer.observed


def worker(number: int, code: int, finished: float = 50) -> Object:
    ended = {"exitCode": code, "finishedAt": at(finished)}
    return pod(f"qa-1-worker-{number}", phase="Succeeded", containerStatuses=[container(terminated=ended)])


def told(seen: Observed, *pods: Object, launch: str = "pytorchjob") -> Status:
    """Tell how a job is judged whose operator calls it a success."""
    record_exit_codes(snapshot(job("Succeeded", launch=launch), list(pods)), seen)
    ctx: Any = SimpleNamespace(run=RUN, target=Kubernetes(launch=launch))
    return outcome(ctx, SUCCEEDED, seen)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (None, "2 ranks met, but none of them ever initialised torch.distributed"),
        ("mpi", "backend gloo was asked for, mpi was used"),
    ],
)
def test_a_success_without_the_backend_that_was_asked_for_is_none(backend: str | None, reason: str) -> None:
    """As of ranks that end by os._exit, or execute another program: no rank itself could tell."""
    seen = told(observed((0, 0), (1, 0), backend=backend), worker(0, 0), worker(1, 0))
    assert seen.state is RunState.FAILED
    assert seen.reason.startswith(reason)


def test_a_worker_that_was_deleted_before_it_ended_is_no_success() -> None:
    seen = told(observed((0, 0)), worker(0, 0))
    assert seen.state is RunState.FAILED
    assert "nothing shows how the ranks on qa-1-worker-1 ended" in seen.reason


@pytest.mark.parametrize(
    ("ends", "pods"),
    [
        ([(0, 0), (1, 0)], [worker(0, 0)]),  # its log was read before it was deleted
        ([(0, 0)], [worker(0, 0), worker(1, 0)]),  # its log was not, and its container tells
        ([], [worker(0, 0), worker(1, 0)]),
    ],
)
def test_a_rank_s_end_is_known_from_its_own_words_or_its_container(
    ends: list[tuple[int, int]], pods: list[Object]
) -> None:
    assert told(observed(*ends), *pods).state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    ("ends", "pods", "reason"),
    [
        ([(0, 0), (1, 3)], [worker(0, 0)], "rank 1 on qa-1-worker-1 ended with exit code 3"),
        ([(0, 0)], [worker(0, 0), worker(1, 137)], "rank 1 on qa-1-worker-1 ended with killed by signal 9"),
        ([(0, 0)], [worker(0, 0), worker(1, 0, finished=5)], "nothing shows"),  # it ended before they met
    ],
)
def test_a_rank_that_ended_badly_is_no_success(
    ends: list[tuple[int, int]], pods: list[Object], reason: str
) -> None:
    seen = told(observed(*ends), *pods)
    assert (seen.state, reason in seen.reason) == (RunState.FAILED, True), seen


def test_a_sidecar_s_exit_code_is_not_that_of_a_rank() -> None:
    stopped = {"exitCode": 143, "finishedAt": at(51)}
    pods = [with_sidecar(worker(rank, 0), terminated=stopped) for rank in (0, 1)]
    assert told(observed(), *pods).state is RunState.SUCCEEDED


def test_mpirun_speaks_for_ranks_that_are_silent_and_not_for_one_that_says_otherwise() -> None:
    assert told(observed((0, 0)), launch="mpijob").state is RunState.SUCCEEDED
    assert "ended with exit code 1" in told(observed((0, 0), (1, 1)), launch="mpijob").reason


@pytest.mark.parametrize("launch", ["pytorchjob", "mpijob"])
def test_the_records_of_ranks_whose_ends_were_not_seen_are_read_after_a_success_too(launch: str) -> None:
    found = snapshot(job("Succeeded", launch=launch), [worker(0, 0), worker(1, 0)])
    assert are_needed(SUCCEEDED, found, observed((0, 0)))
    assert not are_needed(SUCCEEDED, found, observed((0, 0), (1, 0)))
