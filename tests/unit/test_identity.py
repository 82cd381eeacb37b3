"""Whose a run is, under which name it resumes, and what an attempt was started with."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.ledger import Attempt, Entry
from manycpu.pipeline.ledger.configmap import _data, _entry
from manycpu.pipeline.spec.errors import ForeignRunError, LedgerError
from manycpu.pipeline.targets.attempt import attempt_of, join
from manycpu.pipeline.targets.context import Built, RunContext, Staged, home
from manycpu.pipeline.targets.open_run import as_started, find, open_context, reopen
from manycpu.pipeline.verbs.launch import edited, launch

pytestmark = pytest.mark.usefixtures("home")
BUILT = Built(code=None, program=("x.py",), digest="1")


def described(folder: Path, task: str = "", **fields: Any) -> RunContext:
    """Describe one and the same run."""
    run = {"program": "x.py", "output": "out", "nproc_per_node": 1, **fields}
    return replace(open_context(run, None, "the same", base=folder), task=task)


def begin(ctx: RunContext) -> Entry:
    entry: Entry = ctx.ledger.open(ctx.new_entry(0))
    return entry


def test_two_tasks_that_describe_one_run_differently_are_both_named(tmp_path: Path) -> None:
    first, other = described(tmp_path, "task a"), described(tmp_path, "task b", args=["--lr", "1"])
    entry = begin(first)
    join(first, entry, "train")
    with pytest.raises(ForeignRunError, match=r"^training: task b and task a are one run, .* run\.args\."):
        join(other, entry, "train")
    assert entry.run == first.run_fields


def test_a_task_that_was_edited_goes_on_with_its_run(tmp_path: Path) -> None:
    first, now = described(tmp_path, "task a"), described(tmp_path, "task a", args=["--lr", "1"])
    entry = begin(first)
    join(first, entry, "train")
    join(now, entry, "train")
    assert entry.run == now.run_fields


def test_tasks_that_describe_a_run_alike_share_it(tmp_path: Path) -> None:
    entry = begin(described(tmp_path))
    join(described(tmp_path, "task a"), entry, "train")
    join(described(tmp_path, "task b"), entry, "train")
    assert entry.tasks == {"train": "task a"}


def test_a_foreign_task_launches_nothing_and_leaves_no_trace(tmp_path: Path) -> None:
    first, other = described(tmp_path, "task a"), described(tmp_path, "task b", args=["--lr", "1"])
    begin(first)
    with first.ledger.update() as entry:
        join(first, entry, "train")
    before = first.ledger.read()
    with pytest.raises(ForeignRunError):
        launch(other, Staged(), BUILT)
    assert first.ledger.read() == before


def test_a_run_keeps_its_name_when_what_it_is_named_after_is_edited(tmp_path: Path) -> None:
    first = described(tmp_path)
    begin(first)
    for now in (described(tmp_path, program="y.py"), described(tmp_path, job_name="mine")):
        assert now.name != first.name
        assert find(now).name == first.name
        assert find(now).run == now.run
    other = open_context(first.run, None, "another", base=tmp_path)
    assert find(other).name == other.name


def test_an_attempt_goes_by_what_it_was_started_with(tmp_path: Path) -> None:
    first, now = described(tmp_path), described(tmp_path, nnodes=1, args=["b"], output="new")
    entry = begin(first)
    entry.attempt, entry.attempts[1] = 1, attempt_of(first, Staged(), BUILT)
    started = as_started(now, entry, 1)
    # Where the model goes is no matter of an attempt: what is given now counts.
    assert started.run == first.run.model_copy(update={"output": now.run.output})
    assert (started.name, started.key) == (first.name, first.key)
    assert as_started(first, entry, 1) is first
    entry.attempts.clear()  # version 0.1.0 recorded none
    assert as_started(now, entry, 1).run == started.run
    assert reopen(entry).run == first.run


def test_what_differs_from_the_attempt_is_named_and_the_output_is_not_of_it(tmp_path: Path) -> None:
    first, now = described(tmp_path), described(tmp_path, args=["b"], output="new", keep="always")
    entry = begin(first)
    entry.attempt, entry.attempts[1] = 1, attempt_of(first, Staged(), BUILT)
    first.ledger.save(entry)  # type: ignore[attr-defined]
    handle: Any = Handle()
    assert edited(first, handle) is None
    with now.ledger.update() as entry:
        entry.digests["code"] = "2"  # it was built again
    named = now.target.model_copy(update={"directory": str(home())})  # only reaches the run in another way
    finding = edited(replace(now, target=named), handle)
    assert finding is not None
    assert not finding.fatal
    assert str(finding) == (
        "the files of run.program, run.args have changed since attempt 1 began. "
        "This attempt keeps the old values; the next one uses the new."
    )


class Handle:
    attempt = 1


def test_ledgers_of_older_versions_are_read(tmp_path: Path) -> None:
    ctx = described(tmp_path)
    entry = begin(ctx)
    entry.attempt, entry.image = 1, "an image"
    old = entry.model_dump(mode="json", exclude={"attempts", "tasks"})
    read = Entry.model_validate(old)
    assert read.described() == Attempt(run=entry.run, target=entry.target, image="an image")
    assert reopen(read).run == ctx.run


def test_a_configmap_holds_what_attempts_were_started_with(tmp_path: Path) -> None:
    ctx = described(tmp_path, "task a", args=["--lr", "1"], env={"A": "b"})
    entry = begin(ctx)
    join(ctx, entry, "train")
    entry.attempt, entry.attempts[1] = 1, attempt_of(ctx, Staged(data="/d", digests={"data": "2"}), BUILT)
    assert _entry({"data": _data(entry)}) == entry


@pytest.mark.parametrize(
    ("field", "value", "is_read"),
    [
        ("queue", "", True),
        ("claim_size", "9" * 16 + "Gi", True),
        ("launch", "other", False),
        ("new", "x", False),
    ],
)
def test_a_text_that_is_refused_by_now_hides_no_recorded_run(field: str, value: str, is_read: bool) -> None:
    target = {"kind": "kubernetes", "namespace": "ml", field: value}
    run = {"program": "/code/train.py", "output": "/out"}
    entry = Entry(key="0123456789", name="train-0123456789", created=1.0, run=run, target=target)
    with nullcontext() if is_read else pytest.raises(LedgerError, match=f"target.{field}"):
        assert getattr(reopen(entry).target, field) == value


def test_an_output_that_is_refused_by_now_hides_no_recorded_run() -> None:
    run = {"program": "/code/train.py", "output": "s3:/models/squad"}
    entry = Entry(key="0123456789", name="train-0123456789", created=1.0, run=run, target={"kind": "local"})
    assert reopen(entry).run.output == "s3:/models/squad"
