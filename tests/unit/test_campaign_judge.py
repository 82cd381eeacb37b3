"""The judge of campaigns, on histories written by hand: a run that went well, with one thing changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.campaign import plans
from support.campaign_faults import FAULTS
from support.campaign_judge import BOUND_S, breaches, figures
from support.outside_history import History

Line = dict[str, Any]


def line(at: float, what: str, **more: Any) -> Line:
    return {"at": at, "what": what, "run": "a", **more}


def rank(at: float, what: str, process: str = "p", number: int = 0, **more: Any) -> Line:
    return line(at, what, process=process, rank=number, attempt="1", **more)


def ended(at: float, begun: float, code: int | None = 0, number: str = "1", **more: Any) -> Line:
    said = {"said": "report: out", "last": "report: out"}
    return line(at, "ended", verb="run", number=number, begun=begun, code=code, **(said | more))


def fault(begun: float, healed: float, scope: str = "run", run: str = "a", **more: Any) -> Line:
    told = {"fault": "rank killed", "scope": scope, "struck": "process 7 of 2"}
    return line(begun, "fault", begun=begun, healed=healed, **(told | {"run": run} | more))


def found(**more: Any) -> Line:
    usual = {"digest": "d", "sum": 78, "state": "succeeded", "world": 2, "left_behind": [], "attempts": 1}
    return line(31, "found", **(usual | more))


BEFORE: Line = {"at": 0, "what": "before", "objects": {"ConfigMap/root": "1"}}
DECOYS: Line = {"at": 1, "what": "decoys", "objects": {"Pod/a0": "2"}}
AFTER: Line = {"at": 40, "what": "after", "objects": {"ConfigMap/root": "1", "Pod/a0": "2"}, "processes": []}
USER = line(0, "user", kind="static", steps=12, worlds=[2])
TRAINED = [
    rank(10, "start", done=0, world=2),
    rank(11, "saved", done=4),
    rank(14, "beat"),
    rank(15, "end", digest="d"),
]


def round_of(*lines: Line, trained: list[Line] = TRAINED, after: Line = AFTER) -> list[Line]:
    began = {"at": 0, "what": "round", "seed": 7, "commit": "c"}
    return [began, BEFORE, USER, DECOYS, *trained, *lines, after]


GREEN = round_of(ended(30, 1), found())


def test_a_run_that_went_well_broke_nothing() -> None:
    assert breaches(GREEN) == []


def test_the_traceback_of_a_rank_is_none_of_the_command() -> None:
    shown = "  [rank 0 a] Traceback (most recent call last):"
    quoted = "manycpu: rank 0 failed; its last lines:\nTraceback (most recent call last):\nOSError: full"
    failed = ended(20, 1, 1, said=f"{shown}\n{quoted}")
    assert breaches(round_of(failed, fault(2, 3), ended(30, 20), found())) == []


@pytest.mark.parametrize(
    ("history", "wrong"),
    [
        (round_of(ended(30, 1), found(digest="x")), "but none that a rank reported"),
        (round_of(ended(30, 1), found(sum=66)), "the sum of its 12 steps is 66"),
        (round_of(ended(30, 1), found(world=1)), "its report has succeeded, 1 ranks"),
        (round_of(ended(30, 1), found(state="failed")), "its report has failed, 2 ranks"),
        (round_of(ended(30, 1), found(left_behind=["Pod x"])), "left behind ['Pod x']"),
        (round_of(ended(30, 1, None), fault(2, 3)), "it is not green after 1 tries"),
        (round_of(ended(30, 1, 1), ended(60, 30), found()), "command 1 ended with 1, and no fault struck it"),
        (
            round_of(ended(30, 1, 1), fault(2, 3, run="b"), ended(60, 30), found()),
            "command 1 ended with 1, and no fault struck it",
        ),
        (
            round_of(ended(30, 1, 1), fault(2, 3, "nothing"), ended(60, 30), found()),
            "command 1 ended with 1, and no fault struck it",
        ),
        (
            round_of(ended(BOUND_S + 10, 1), fault(2, 3), found()),
            f"command 1 had not ended {BOUND_S + 7} s after all was healed",
        ),
        (
            round_of(
                ended(20, 1, 1, said="Traceback (most recent call last):"),
                fault(2, 3),
                ended(30, 20),
                found(),
            ),
            "command 1 ended with a traceback",
        ),
        (round_of(ended(20, 1, 1, last=""), fault(2, 3), ended(30, 20), found()), "failed without a word"),
    ],
)
def test_what_a_command_breaks_is_seen(history: list[Line], wrong: str) -> None:
    assert wrong in "; ".join(breaches(history))


AGAIN = [
    rank(20, "start", "q", done=4, world=2),
    rank(25, "end", "q", digest="e"),
]


@pytest.mark.parametrize(
    ("trained", "lines", "wrong"),
    [
        (  # a killed training that resumed
            [*TRAINED[:3], *AGAIN],
            [fault(12, 13)],
            "",
        ),
        (
            [*TRAINED[:3], rank(20, "start", "q", done=0, world=2), AGAIN[1]],
            [fault(12, 13)],
            "a: rank 0 began after step 0, and step 4 was saved",
        ),
        (
            [*TRAINED[:2], rank(24, "beat"), *AGAIN],
            [fault(12, 13)],
            "a: two ranks 0 trained at once for 4.0 s",
        ),
        (
            [*TRAINED, *AGAIN],
            [fault(2, 3)],
            "a: it trained to the end 2 times",
        ),
        (  # a fault in the moment in which a training ends may cost it
            [*TRAINED, *AGAIN],
            [fault(16, 17)],
            "",
        ),
        (
            [*TRAINED[:3], *AGAIN],
            [fault(12, 13, "nothing")],
            "a: it trained 2 times, and no fault struck its training",
        ),
        (  # only its command was killed: the next one has to attach to the training
            [*TRAINED[:3], *AGAIN],
            [fault(12, 13, "command")],
            "a: it trained 2 times, and no fault struck its training",
        ),
    ],
)
def test_what_trainings_break_is_seen(trained: list[Line], lines: list[Line], wrong: str) -> None:
    last = trained[-1]["digest"]
    history = round_of(*lines, ended(30, 1), found(digest=last), trained=trained)
    assert "; ".join(breaches(history)) == wrong


def test_a_killed_command_may_fail_and_the_next_one_attaches() -> None:
    killed = ended(12, 1, -9, last="")
    assert breaches(round_of(fault(11, 12, "command"), killed, ended(30, 13, number="2"), found())) == []


def test_an_older_model_is_seen() -> None:
    history = round_of(fault(16, 17), ended(30, 1), found(), trained=[*TRAINED, *AGAIN])
    assert breaches(history) == ["a: its model is not the one that the last rank 0 wrote, but an older one"]


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"objects": {"ConfigMap/root": "1"}}, ["objects of others are gone: Pod/a0"]),
        ({"objects": AFTER["objects"] | {"Pod/a0": "3"}}, ["objects of others are gone: Pod/a0"]),
        ({"objects": AFTER["objects"] | {"Pod/a": "4"}}, ["left: Pod/a"]),
        ({"processes": ["python train.py"]}, ["left: python train.py"]),
    ],
)
def test_what_is_left_and_what_is_gone_is_seen(more: Line, wrong: list[str]) -> None:
    assert breaches(round_of(ended(30, 1), found(), after=AFTER | more)) == wrong


def test_what_a_fault_deleted_is_not_held_against_the_run() -> None:
    deleted = {"at": 5, "what": "deleted by a fault", "object": "Pod/a0"}
    after = AFTER | {"objects": BEFORE["objects"]}
    assert breaches(round_of(deleted, ended(30, 1), found(), after=after)) == []


def test_only_trials_whose_fault_struck_count() -> None:
    struck = round_of(fault(2, 3), ended(5, 1, -9), ended(30, 5), found())
    missed = round_of(fault(2, 3, struck=""), ended(30, 1), found(sum=1))
    assert figures([struck, missed, GREEN]) == {
        "commit": "c",
        "runs": {"static": 3},
        "struck": {"rank killed": 1},
        "trials": 1,
        "violations": 1,
    }


def test_a_round_draws_the_same_when_it_is_replayed_and_all_faults_take_turns() -> None:
    drawn = plans(7, range(1, 49))
    assert plans(7, range(4, 7)) == drawn[3:6]
    assert plans(8, range(4, 7)) != drawn[3:6]
    assert {plan.moves[0].fault for plan in drawn} == {*FAULTS}


def test_a_history_is_kept_as_it_was_written(tmp_path: Path) -> None:
    history = History(tmp_path / "kept" / "one.jsonl")
    history.add("start", run="a", rank=0)
    history.add("end", run="a", rank=0)
    assert [json.loads(text) for text in history.file.read_text().splitlines()] == history.lines
    assert history.of("a", "end") == history.lines[1:]
