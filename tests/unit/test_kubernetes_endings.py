"""What of a job failed first: a rank that said so, or a container that ended in silence."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.api_objects import T0, Object, at, container, handle, job, pod, snapshot

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.state import RankFailure, RunState, Status
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    TAIL,
    AttemptRecorder,
    Line,
    LogBatch,
)
from manycpu.pipeline.targets.kubernetes.following.judgement import with_first_failure

FAILED = Status(state=RunState.FAILED, reason="the PyTorchJob has failed")


@pytest.fixture
def recorder() -> AttemptRecorder:
    entry = Entry(key="k", name="qa", created=T0, run={}, target={}, attempt=1)
    ctx: Any = SimpleNamespace(ledger=SimpleNamespace(read=lambda: entry))
    return AttemptRecorder(ctx, handle(), None, "")


def says(recorder: AttemptRecorder, seconds: float, *lines: str, rank: int | None = 0) -> None:
    activity = [Line(events.RankLine(rank, "node-a", line), T0 + seconds, "a") for line in lines]
    recorder.record_delivered([LogBatch("a", activity, [])])


def meets(recorder: AttemptRecorder) -> None:
    proof = events.encode("proof", rank=0, world_size=1, host="node-a", hostname="a")
    says(recorder, 5, proof)


def ended(code: int = 1, reason: str = "Error", began: float = 3, end: float = 10) -> Object:
    last = {"exitCode": code, "reason": reason, "startedAt": at(began), "finishedAt": at(end)}
    return pod("a", phase="Failed", containerStatuses=[container(terminated=last)])


def test_a_rank_that_told_of_its_end_is_believed_however_much_its_launcher_says_after_it(
    recorder: AttemptRecorder,
) -> None:
    meets(recorder)
    says(recorder, 10.2, "no cheese", events.encode("exit", rank=0, host="node-a", code=3))
    says(recorder, 10.4, *(["a traceback of the launcher"] * (TAIL + 1)), rank=None)
    seen = with_first_failure(snapshot(job("Failed"), [ended()]), recorder, FAILED)
    assert seen.failure == RankFailure(rank=0, host="node-a", exit_code=3, last_lines=("no cheese",))


def test_a_container_that_ended_in_silence_speaks_with_its_last_lines(recorder: AttemptRecorder) -> None:
    meets(recorder)
    says(recorder, 9, "step 7")
    seen = with_first_failure(snapshot(job("Failed"), [ended(137, "OOMKilled")]), recorder, FAILED)
    assert seen.failure is not None
    assert (seen.failure.rank, seen.failure.host, seen.failure.exit_code) == (0, "node-a", -9)
    assert seen.failure.last_lines == ("step 7",), "events are not for people"
    assert "more memory than its limit, see run.resources.memory" in seen.reason


def test_what_was_told_before_a_restart_does_not_speak_for_the_container_after_it(
    recorder: AttemptRecorder,
) -> None:
    meets(recorder)
    says(recorder, 10, events.encode("exit", rank=0, host="node-a", code=0))
    seen = with_first_failure(
        snapshot(job("Failed"), [ended(137, "OOMKilled", began=12, end=20)]), recorder, FAILED
    )
    assert seen.failure is not None
    assert seen.failure.exit_code == -9
