"""What a function returns: told by rank 0 as JSON, in lines, and put together again."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.node.emit import NodeExit
from manycpu.pipeline.node.function_task import call
from manycpu.pipeline.observed import Observer, observe
from manycpu.pipeline.run_report import draft
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.event_types import decode, readable
from manycpu.pipeline.spec.exit_records import EXIT_RETURNED
from manycpu.pipeline.spec.state import RunState, describe_exit
from manycpu.pipeline.targets.kubernetes.following import attempt_recorder

Told = Callable[..., list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Call a function as a rank does; the lines that it writes."""

    def run(function: Callable[..., Any], *places: str, rank: int = 0, **arguments: Any) -> list[str]:
        monkeypatch.setenv("RANK", str(rank))
        given = json.dumps({"arguments": arguments, "places": places})
        monkeypatch.setattr(sys, "argv", ["fit.py", given])
        call(function)
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line.encode()) < events.LINE_LIMIT for line in lines)
        return [f"[rank {rank} a] {line}" for line in lines]

    return run


def test_arguments_of_every_kind_and_places(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(first: int, data: str, /, *rest: int, lr: float = 0.5, **more: str) -> Any:
        return [first, data, rest, lr, more]

    monkeypatch.setenv("MANYCPU_DATA", "/staged")
    lines = told(fit, "data", first=1, rest=[2, 3], more={"a": "b"})
    assert observe(lines).returned == [1, "/staged", [2, 3], 0.5, {"a": "b"}]


@pytest.mark.parametrize(
    "value", [None, 0, "é" * 9000, "😀" * 5000, '"\\' * 8000, {"a": [1, None, {"b": 0.5}]}]
)
def test_a_value_comes_whole_whatever_is_in_it(told: Told, value: Any) -> None:
    lines = told(lambda: value)
    assert observe(lines).returned == value
    assert observe([*lines[:-1], *lines]).returned == value, "a log that is read again"
    if len(lines) > 1:
        assert observe(lines[1:]).returned is None, "a part is missing"


def test_only_rank_0_tells(told: Told) -> None:
    assert told(lambda: 1, rank=1) == []
    assert (
        observe([events.join(1, "a", events.encode("returned", part=1, parts=1, text="1"))]).returned is None
    )


def test_numbers_of_libraries_are_plain_numbers(told: Told) -> None:
    class Scalar:
        shape = ()

        def item(self) -> float:
            return 0.25

    assert observe(told(lambda: {"loss": Scalar()})).returned == {"loss": 0.25}


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "is no JSON (there is a set in it)"),
        (float("nan"), "is no JSON"),
        ("\ud800", "is no JSON"),
        (nested(33), "more than 32 levels deep"),
        ("x" * (32 << 10), "returned 32,770 bytes of JSON, and 32,768 can be passed on"),
    ],
)
def test_what_cannot_be_passed_on_ends_the_rank_and_says_what_to_do(
    told: Told, value: Any, words: str
) -> None:
    def fit() -> Any:
        return value

    with pytest.raises(NodeExit) as end:
        told(fit)
    assert end.value.code == EXIT_RETURNED
    assert words in end.value.message
    assert "Write it to a file in `output`" in end.value.message
    assert "cannot be passed on" in describe_exit(EXIT_RETURNED)


def test_the_largest_value_survives_a_cursor_a_ledger_and_the_report(told: Told) -> None:
    value = {"text": "x" * ((32 << 10) - 12)}
    lines = told(lambda: value)
    first = Observer()
    for line in lines[:3]:
        assert not first.add_line(events.split(line))
    fields = {"attempt": 1, "observed": first.observed.model_dump(mode="json", exclude_defaults=True)}
    kept = attempt_recorder.unpack(json.loads(json.dumps(attempt_recorder.pack(fields))))
    again = Observer(type(first.observed).model_validate(kept["observed"]))
    ended = [again.add_line(events.split(line)) for line in lines[3:]]
    assert ended == [False] * (len(ended) - 1) + [True], "all of it is to be written down at once"
    assert again.observed.returned == value
    fields = {"attempt": 1, "observed": again.observed.model_dump(mode="json", exclude_defaults=True)}
    least = attempt_recorder.unpack(attempt_recorder.pack_only_the_end(fields))
    assert least["observed"]["returned"] == value
    entry = Entry(key="k", name="fit-k", created=0, run={}, target={})
    report = draft(entry, again.observed, RunState.SUCCEEDED)
    assert report.returned == value
    assert "parts" not in report.model_dump()


def test_a_restart_forgets_what_was_returned_before(told: Told) -> None:
    met = (
        '[rank 0 a] ::manycpu:: {"event": "proof", "rank": 0, "world_size": 1, "host": "a", "meeting": "%s"}'
    )
    assert observe([met % "one", *told(lambda: 1)]).returned == 1
    assert observe([met % "one", *told(lambda: 1), met % "two"]).returned is None


@pytest.mark.parametrize("text", ["{", "NaN", "[" * 5000 + "]" * 5000, '"\\ud800"', "[" * 40 + "]" * 40])
def test_what_a_script_prints_itself_is_believed_only_if_it_is_json(text: str) -> None:
    line = events.encode("returned", part=1, parts=1, text=text) if len(text) < 3000 else ""
    assert observe([events.join(0, "a", line)]).returned is None


def test_the_result_of_a_notebook_is_kept_from_rank_0_of_the_last_meeting_and_not_reported() -> None:
    met = (
        '[rank 0 a] ::manycpu:: {"event": "proof", "rank": 0, "world_size": 1, "host": "a", "meeting": "%s"}'
    )
    honest, other = (events.join(rank, "a", events.encode("result", value=rank)) for rank in (0, 1))
    observed = observe([met % "one", honest, other])
    again = type(observed).model_validate_json(observed.model_dump_json(exclude_defaults=True))
    assert (again.result and again.result.value) == 0
    assert observe([met % "one", honest, met % "two"]).result is None
    report = draft(Entry(key="k", name="fit-k", created=0, run={}, target={}), observed, RunState.SUCCEEDED)
    assert "result" not in report.model_dump()


def test_people_see_what_was_returned(told: Told) -> None:
    (line,) = told(lambda: {"loss": 0.5})
    split = events.split(line)
    assert readable(split, decode(split.text)) == '[rank 0 a] returned: {"loss": 0.5}'
