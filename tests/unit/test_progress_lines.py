"""How much of a training's progress people read as lines: on a pipe, in Airflow's log, in a notebook."""

import sys
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from rich.console import Console

from manycpu.pipeline.display import Display
from manycpu.pipeline.listeners import RankListener, ReadableLog
from manycpu.pipeline.notebook.cell import CellDisplay
from manycpu.pipeline.spec.event_types import (
    Event,
    ExitEvent,
    MetricsEvent,
    OwnEvent,
    PaceEvent,
    ProgressEvent,
    WarningEvent,
)
from manycpu.pipeline.spec.events import RankLine

LINE = RankLine(0, "a", "")
Printed = Callable[[], str]


def of_the_log(capsys: pytest.CaptureFixture[str]) -> tuple[RankListener, Printed]:  # noqa: ARG001
    lines: list[str] = []
    return ReadableLog(lines.append), lambda: "\n".join(lines)


def on_a_pipe(capsys: pytest.CaptureFixture[str]) -> tuple[RankListener, Printed]:  # noqa: ARG001
    pipe = StringIO()
    return Display(Console(file=pipe)), pipe.getvalue


def of_a_plain_notebook(capsys: pytest.CaptureFixture[str]) -> tuple[RankListener, Printed]:
    return CellDisplay(None), lambda: capsys.readouterr().out


def closed() -> TextIOWrapper:
    stream = TextIOWrapper(BytesIO(), "utf-8")
    stream.close()
    return stream


@pytest.mark.parametrize("stdout", [TextIOWrapper(BytesIO(), "latin-1"), closed(), None], ids=str)
def test_a_cell_shows_what_its_stream_can_and_continues(
    stdout: TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = CellDisplay(None)
    monkeypatch.setattr(sys, "stdout", stdout)
    display.line(RankLine(0, "a", "loss → 0.5"))
    display.event(ExitEvent(code=1, host="a", rank=0), LINE)
    failure = display.failure()
    monkeypatch.undo()
    assert failure == (0, "a", "loss → 0.5")
    if stdout is not None and not stdout.closed:
        stdout.seek(0)
        assert stdout.readlines()[0] == "loss ? 0.5\n"


def step(number: int, time: float | None, total: int | None = None) -> ProgressEvent:
    return ProgressEvent(step=number, total_steps=total, time=time)


def steps(*events: Event) -> list[int]:
    """List the steps of which a log has a line."""
    lines: list[str] = []
    log = ReadableLog(lines.append)
    for event in events:
        log.event(event, LINE)
    log.flush()
    return [int(line.split("step ")[1].split(" ")[0]) for line in lines if "step " in line]


@pytest.mark.parametrize("where", [of_the_log, on_a_pipe, of_a_plain_notebook])
def test_of_many_steps_the_first_one_in_ten_seconds_and_the_last_have_a_line(
    where: Callable[..., tuple[RankListener, Printed]], capsys: pytest.CaptureFixture[str]
) -> None:
    listener, printed = where(capsys)
    for number in range(1, 2501):
        listener.event(step(number, 100 + (number - 1) / 100), LINE)
        if number % 1000 == 0:
            listener.line(RankLine(0, "a", f"line {number}"))
    listener.event(WarningEvent(message="it is hot", time=125.0), LINE)
    listener.flush()
    told = [line.strip().removeprefix("[rank 0 a] ") for line in printed().splitlines()]
    expected = ["step 1", "line 1000", "step 1001", "line 2000", "step 2001"]
    assert told == [*expected, "warning: it is hot", "step 2500"]


def test_a_log_that_is_read_later_has_the_lines_that_it_had() -> None:
    """The ranks' clock counts, not that of who reads."""
    assert steps(*(step(number, number) for number in range(40))) == [0, 10, 20, 30, 39]


def test_steps_that_take_longer_each_have_a_line() -> None:
    assert steps(*(step(number, 60 * number) for number in range(5))) == [0, 1, 2, 3, 4]


def test_the_last_of_the_steps_is_not_held_back() -> None:
    lines: list[str] = []
    log = ReadableLog(lines.append)
    for number in range(1, 5):
        log.event(step(number, number, total=4), LINE)
    log.line(RankLine(0, "a", "trained"))
    assert [line.removeprefix("[rank 0 a] ") for line in lines] == ["step 1 of 4", "step 4 of 4", "trained"]


def test_what_is_held_back_comes_with_the_next_event_after_its_time() -> None:
    """Such as a validation, which takes its time and no step."""
    events = [step(1, 0), step(2, 1), PaceEvent(step=2, step_seconds=1, time=9), step(3, 9.5)]
    assert steps(*events, MetricsEvent(values={"f1": 1}, time=11.0), step(4, 12), step(5, 13)) == [1, 3, 5]


def test_another_host_s_clock_brings_nothing_forward() -> None:
    lines: list[str] = []
    log = ReadableLog(lines.append)
    for number in range(100):
        log.event(step(number, number / 100), LINE)
        log.event(PaceEvent(step=number, step_seconds=1, time=300.0), RankLine(1, "b", ""))
    assert len(lines) == 1


def test_how_far_a_rank_came_is_told_before_its_end_and_the_next_begins_anew() -> None:
    ended = ExitEvent(code=1, host="a")
    assert steps(step(1, 0), step(2, 1), ended, step(1, 2), step(2, 3), ended) == [1, 2, 1, 2]


def test_an_event_of_a_script_s_own_may_have_any_time() -> None:
    own = [OwnEvent(event="own", time=time) for time in ("noon", 10**400, float("nan"))]
    assert steps(step(1, 0), *own, step(2, 11)) == [1, 2]


def test_events_without_a_time_are_of_the_moment_in_which_they_are_heard() -> None:
    assert steps(*(step(number, None) for number in range(100))) == [0, 99]


def test_a_transfer_on_a_pipe_has_a_line_every_ten_seconds_and_a_short_one_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pipe = [100.0], StringIO()
    monkeypatch.setattr("manycpu.pipeline.display.time.monotonic", lambda: now[0])
    display = Display(Console(file=pipe))
    for verb, seconds, percents in (("stage", 0.2, []), ("export", 25.0, [40, 80])):
        display.begin(verb)
        start, before = now[0], pipe.tell()
        for percent in range(101):
            now[0] = start + seconds * percent / 100
            display.progress(percent * 1000, 100_000)
        assert pipe.getvalue()[before:] == "".join(f"  {percent} % of 100.0 kB\n" for percent in percents)
        display.end(verb, seconds, "done")
