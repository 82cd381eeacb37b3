"""What the ledger keeps of a run of many ranks: small enough for a ConfigMap, whatever happens."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.api_objects import T0, handle

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.configmap import _data
from manycpu.pipeline.spec.errors import ClusterError, TrainingFailedError
from manycpu.pipeline.spec.events import RankLine, encode
from manycpu.pipeline.spec.observed import Observed, Rank
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import sharing
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    LIMIT,
    AttemptRecorder,
    AttemptState,
    Line,
    LogBatch,
    attempt_state,
)
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.wait import conclude

EXIT = encode("exit", code=1, host="a")
MOST = 1 << 20  # bytes of a ConfigMap, as the API server counts them
RANKS, PODS = 4096, 512


class Ledger:
    """A ledger in memory that refuses what an API server refuses."""

    def __init__(self, observed: dict[str, Any] | None = None, room: int = MOST) -> None:
        self.entry = Entry(key="k", name="qa", created=T0, run={}, target={}, attempt=1, observed=observed)
        self.room = room

    def read(self) -> Entry:
        return self.entry.model_copy(deep=True)

    @contextmanager
    def update(self) -> Iterator[Entry]:
        entry = self.read()
        yield entry
        if sum(map(len, _data(entry).values())) > self.room:
            raise ClusterError.of_status(422, "PATCH: data: Too long: must have at most 1048576 bytes")
        self.entry = entry


def recorder(ledger: Ledger) -> AttemptRecorder:
    return AttemptRecorder(SimpleNamespace(ledger=ledger), handle(), None, "me")  # type: ignore[arg-type]


def large(rounds: int) -> AttemptState:
    """Make what is known of a run of many ranks that met many times."""
    chance = random.Random(7)  # noqa: S311 - makes sizes, not secrets
    hosts = [f"node-{chance.getrandbits(40):x}" for _ in range(PODS)]
    ranks = [
        Rank(rank=n, host=hosts[n // 8], cpus=2.0, hostname=f"qa-1-worker-{n // 8}") for n in range(RANKS)
    ]
    met = [
        {
            "round": n,
            "world_size": RANKS,
            "hosts": chance.sample(hosts, PODS),
            "ranks": chance.sample(range(RANKS), RANKS),
        }
        for n in range(rounds)
    ]
    told = [f"{rank}@{T0 + 60 * n + chance.random()}" for n in range(rounds) for rank in range(RANKS)]
    position = [[[T0, 3, T0 * 10**9]], T0 * 10**9 + chance.getrandbits(29), 1, T0 * 10**9]
    cursor = {
        f"{chance.getrandbits(128):x}/pytorch/{n}": position for _ in range(PODS) for n in range(rounds)
    }
    return AttemptState(
        attempt=1,
        by="me",
        cursor=cursor,
        observed=Observed(
            world_size=RANKS,
            ranks=ranks,
            rounds=met,
            backend="gloo",
            introduced=told,
            metrics={"loss": 1.0},
        ),
        parted={f"qa-1-worker-{n}": T0 + 1.5 for n in range(PODS)},
        verdict=Status(state=RunState.SUCCEEDED),
    )


@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_the_ledger_holds_what_many_ranks_said_in_many_meetings(rounds: int) -> None:
    ledger = Ledger()
    writing = recorder(ledger)
    writing.state = large(rounds)
    writing.write(writing.fields())
    assert len(json.dumps(ledger.entry.observed)) < LIMIT + 100
    kept = attempt_state(ledger.entry, handle())
    assert kept.observed.ranks == writing.state.observed.ranks
    assert (kept.observed.world_size, kept.observed.metrics) == (RANKS, {"loss": 1.0})
    last = kept.observed.rounds[-1]
    assert (last["round"], last["ranks"]) == (rounds - 1, [*range(RANKS)])
    assert kept.verdict == writing.state.verdict
    assert len(kept.cursor) >= (PODS if rounds < 30 else 0)


def test_of_two_meetings_of_many_ranks_nothing_is_left_out() -> None:
    ledger = Ledger()
    writing = recorder(ledger)
    writing.state = large(2)
    writing.write(writing.fields())
    kept = attempt_state(ledger.entry, handle())
    for one in writing.state.observed.rounds:
        one["ranks"].sort()
    assert kept == writing.state


def test_a_ledger_that_takes_no_more_still_takes_how_it_ended() -> None:
    ledger = Ledger(room=200_000)
    writing = recorder(ledger)
    writing.state = large(30)
    writing.write(writing.fields())
    kept = attempt_state(ledger.entry, handle())
    assert kept.verdict == writing.state.verdict
    assert len(kept.observed.ranks) == RANKS


def test_few_ranks_are_kept_as_people_can_read_them() -> None:
    ledger = Ledger()
    writing = recorder(ledger)
    proof = encode("proof", rank=0, world_size=1, host="a")
    writing.record_delivered([LogBatch("u/c/0", [Line(RankLine(0, "a", proof), T0 + 1.0, "a")], [])])
    writing.write(writing.fields())
    assert ledger.entry.observed is not None
    assert ledger.entry.observed["observed"]["world_size"] == 1


def test_a_ledger_of_an_older_version_is_read() -> None:
    written = large(2).model_dump(mode="json", exclude_defaults=True)
    assert attempt_state(Ledger(written).entry, handle()) == large(2)


@pytest.mark.parametrize("packed", ["", "no base64!", "AAAA", 7])
def test_a_ledger_that_is_none_of_ours_says_nothing(packed: Any) -> None:
    assert attempt_state(Ledger({"attempt": 1, "packed": packed}).entry, handle()) == AttemptState(attempt=1)


def test_what_grows_with_time_is_bounded() -> None:
    activity = recorder(Ledger())
    for number in range(300):
        lines = [
            encode("warning", message=f"warning {number}"),
            encode("metrics", values={f"{number}.{n}": 1 for n in range(9)}),
            "x" * 100_000,
        ]
        told = [Line(RankLine(0, "a", line), T0 + 1.0, "a") for line in lines]
        activity.record_delivered([LogBatch(f"uid/pytorch/{number}", told, [])])
    activity.record_delivered([LogBatch("uid/pytorch/299", [Line(RankLine(0, "a", EXIT), 2.0, "a")], [])])
    assert [*activity.state.cursor] == [f"uid/pytorch/{number}" for number in (297, 298, 299)]
    assert len(json.dumps(activity.fields())) < 200_000


def test_the_end_of_a_rank_that_began_anew_in_another_pod_is_none_of_its_own() -> None:
    listening = recorder(Ledger())

    def tell(pod: str, seconds: float, event: str, **fields: object) -> None:
        line = RankLine(0, "a", encode(event, rank=0, host="a", hostname="node-0", **fields))
        listening.record_delivered([LogBatch(f"{pod}/x/0", [Line(line, T0 + seconds, pod)], [])])

    tell("old", 1, "proof", meeting="m1", **PROOF)
    tell("new", 20, "proof", meeting="m2", **PROOF)
    tell("new", 25, "exit", code=0)
    tell("old", 28, "exit", code=-15)
    tell("old", 1, "proof", meeting="m1", **PROOF)  # a log that is read again
    tell("old", 28, "exit", code=-15)
    observed = listening.state.observed
    assert (observed.failure, observed.ranks[0].exit_code) == (None, 0)


PROOF = {"world_size": 1, "cpus": 1.0, "round": 0, "backend": "gloo", "threads": 1}


def test_last_lines_are_those_that_people_can_read() -> None:
    listening = recorder(Ledger())
    lines = [Line(RankLine(0, "a", text), T0, "p0") for text in ("Traceback", EXIT, "RuntimeError: no")]
    listening.record_delivered([LogBatch("p0/x/0", lines, [])])
    assert listening.tails["p0"] == ["Traceback", "RuntimeError: no"]
    assert listening.state.parted == {"p0": T0}


class ReadOnly:
    """A namespace in which nothing may be changed any more."""

    namespace = "ml"

    def __init__(self) -> None:
        self.ledger: dict[str, Any] = {}

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.ledger = manifest | {"metadata": manifest["metadata"] | {"uid": "u", "resourceVersion": "1"}}
        return self.ledger

    def get(self, *_: str) -> dict[str, Any]:
        return self.ledger

    def now(self) -> float:
        return T0

    def patch(self, *_: Any, **__: Any) -> None:
        raise ClusterError.of_status(403, "configmaps is forbidden")


def test_a_success_that_cannot_be_recorded_stays_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"program": "question_answering", "output": str(tmp_path / "out")}
    target = {"kind": "kubernetes", "launch": "pytorchjob", "namespace": "ml"}
    access = sharing(cast("Cluster", ReadOnly()))
    ctx = open_context(run, target, "test", base=tmp_path, access=access)
    ctx.ledger.open(ctx.new_entry(1.0))
    conclude(ctx, handle(), Status(state=RunState.SUCCEEDED))
    assert "configmaps is forbidden" in caplog.text
    with pytest.raises(TrainingFailedError, match="no cheese"):
        conclude(ctx, handle(), Status(state=RunState.FAILED, reason="no cheese"))


def test_what_is_not_new_is_not_written_again() -> None:
    ledger = Ledger()
    recording = recorder(ledger)
    recording.write(recording.fields())
    written, ledger.entry.observed = ledger.entry.observed, None
    recording.write(recording.fields())
    assert ledger.entry.observed is None
    recording.state.spoke = T0
    recording.write(recording.fields())
    assert ledger.entry.observed == {**(written or {}), "spoke": T0}


def test_what_could_not_be_written_is_tried_again() -> None:
    ledger = Ledger(room=0)
    recording = recorder(ledger)
    with pytest.raises(ClusterError):
        recording.write(recording.fields())
    ledger.room = MOST
    recording.write(recording.fields())
    assert ledger.entry.observed == {"attempt": 1, "by": "me"}


def test_who_goes_on_with_what_is_recorded_writes_nothing_anew() -> None:
    ledger = Ledger()
    first = recorder(ledger)
    first.write(first.fields())
    second = recorder(ledger)
    ledger.room = 0
    second.write(second.fields())
