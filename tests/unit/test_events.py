"""A line that only looks like an event does no harm: it is read as an ordinary line."""

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.api_objects import T0, handle
from support.nasty_lines import NASTY

from manycpu.pipeline.display import Display, summary
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.listeners import tell
from manycpu.pipeline.observed import Observer
from manycpu.pipeline.run_report import Report, as_json, draft, parse
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.event_types import decode, readable
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    AttemptRecorder,
    Line,
    LogBatch,
    attempt_state,
)
from manycpu.pipeline.targets.kubernetes.following.logs import RateLimiter

LINES = [*map(events.split, NASTY[:40]), *(RankLine(0, "a", line) for line in NASTY)]


def entry(**more: Any) -> Entry:
    return Entry(key="k", name="qa", created=T0, run={}, target={}, attempt=1, **more)


def report(observed: Observed) -> Report:
    return draft(entry(), observed, RunState.SUCCEEDED)


def test_every_line_can_be_read_shown_and_kept_whatever_it_is() -> None:
    console = Console(file=StringIO(), force_terminal=True)
    ctx: Any = SimpleNamespace(ledger=SimpleNamespace(read=entry))
    with Display(console) as display:
        display.begin("wait")
        for line in LINES:
            record, observer = AttemptRecorder(ctx, handle(), None, ""), Observer()
            tell([line], display)
            readable(line).encode()
            RateLimiter(0).admit([line], 1)
            observer.add_line(line)
            record.record_delivered([LogBatch("log", [Line(line, float(T0), "a")], [])])
            written = report(observer.observed)
            if observer.observed.metrics:
                summary(console, written, "out")
            assert parse(as_json(written)) is not None, line.text
            assert attempt_state(entry(observed=record.fields()), handle()) is not None, line.text


@pytest.mark.parametrize(
    ("event", "fields"), [("warning", {"message": ["no", "text"]}), ("exit", {"code": "0"})]
)
def test_an_event_of_ours_in_another_shape_is_an_ordinary_line(event: str, fields: dict[str, Any]) -> None:
    line = events.encode(event, **fields)
    assert decode(line) is None
    assert readable(RankLine(0, "a", line)) == f"[rank 0 a] {line}"


def test_an_event_of_a_script_s_own_is_one() -> None:
    event = decode(events.encode("own", what=[1], time="noon"))
    assert event is not None
    assert event.model_dump(exclude_unset=True) == {"event": "own", "what": [1], "time": "noon"}


def test_a_ledger_with_a_shape_that_an_older_version_took_is_read() -> None:
    kept = attempt_state(entry(observed={"attempt": 1, "observed": {"backend": 7}}), handle())
    assert (kept.attempt, kept.observed.backend) == (1, None)
