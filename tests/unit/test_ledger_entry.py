"""What a ledger keeps of a run, read again by this version and from older ones."""

from pathlib import Path

import pytest

from manycpu.pipeline import run_report
from manycpu.pipeline.ledger import CLEANUP, VERBS, Attempt, End, Entry, VerbRecord
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import as_started, open_context


def run(folder: Path) -> RunContext:
    """Describe a run that leaves its backend to the ranks."""
    return open_context({"program": "train.py", "output": "out"}, {"kind": "local"}, "qa", base=folder)


def test_a_backend_left_to_the_ranks_is_recorded_as_such(tmp_path: Path) -> None:
    entry = Entry.model_validate_json(run(tmp_path).new_entry(0.0).model_dump_json())
    assert entry.run["backend"] is None
    assert as_started(run(tmp_path), entry, 1).run.backend is None


def test_an_attempt_recorded_when_gloo_was_the_default_is_judged_by_gloo(tmp_path: Path) -> None:
    ctx = run(tmp_path)
    older = {name: value for name, value in ctx.run_fields.items() if name != "backend"}
    entry = ctx.new_entry(0.0)
    entry.attempts[1] = Attempt.model_validate({"run": older, "target": ctx.target_fields})
    assert as_started(ctx, entry, 1).run.backend == "gloo"


def test_a_person_who_cancels_is_recorded_rather_than_the_clean_up_that_was_faster(tmp_path: Path) -> None:
    entry = run(tmp_path).new_entry(0.0)
    entry.record_canceller(CLEANUP)
    assert not entry.cancelled_by_person(entry.attempt)
    entry.record_canceller("task train, try 1")
    entry.record_canceller(CLEANUP)
    assert entry.cancelled == {entry.attempt: "task train, try 1"}


def test_a_secret_in_the_reason_of_an_end_is_hidden_in_the_report(tmp_path: Path) -> None:
    entry = run(tmp_path).new_entry(0.0)
    entry.run["env"] = {"HF_TOKEN": "hf_abcdef"}
    entry.ends[1] = End(state=RunState.FAILED, reason="hf_abcdef is no image")
    report = run_report.draft(entry, Observed(), RunState.FAILED)
    assert [end["reason"] for end in report.history] == ["*** is no image"]


@pytest.mark.parametrize("error", [ExportError("caf\udce9 is in it"), ValueError("caf\udce9 is in it")])
def test_an_error_that_names_a_file_that_is_no_utf8_is_recorded_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("MANYCPU_HOME", str(tmp_path))
    ctx = run(tmp_path)
    ctx.ledger.open(ctx.new_entry(0.0))
    with pytest.raises(type(error)), ctx.ledger.timed("export"):
        raise error
    recorded = ctx.ledger.read().verbs["export"].error
    assert (recorded or "").startswith("caf\\udce9 is in it")
    report = run_report.draft(ctx.ledger.read(), Observed(), RunState.FAILED, recorded)
    assert run_report.parse(run_report.as_json(report)) == report


def test_verbs_are_in_the_order_of_a_run_however_they_were_recorded(tmp_path: Path) -> None:
    """A ConfigMap has them in alphabetical order, and so have the reports of earlier versions."""
    record = VerbRecord(seconds=1, result="done")
    entry = run(tmp_path).new_entry(0.0)
    entry.verbs = dict.fromkeys(("a-later-verb", *sorted(VERBS)), record)
    in_order = [*VERBS, "a-later-verb"]
    assert [*Entry.model_validate_json(entry.model_dump_json()).verbs] == in_order
    report = run_report.draft(entry, Observed(), RunState.RUNNING)
    read = run_report.parse(run_report.as_json(report))
    assert read is not None
    assert [*report.verbs] == [*read.verbs] == in_order
