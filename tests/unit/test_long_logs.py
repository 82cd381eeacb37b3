"""A training's log may be longer than memory: it is heard as it passes, once, and told in parts."""

import json
import os
import socket
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import DeadlineError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.targets.machines import wait
from manycpu.pipeline.targets.machines.driver import MachineDriver
from manycpu.pipeline.targets.machines.wait import ACTIVITY, MachineWatch

SIZE = 24 << 20
LINE = "x" * 4000
MET = events.encode("proof", rank=0, world_size=1, host="a")


def context() -> Any:
    entry = Entry(key="k", name="r", created=1.0, run={}, target={"launch": "torchrun"}, attempt=1)
    run = SimpleNamespace(run_timeout=60)
    return SimpleNamespace(ledger=SimpleNamespace(read=lambda: entry), run=run)


@pytest.fixture
def ended(tmp_path: Path) -> ProcessHandle:
    """Leave what an attempt leaves that has ended, with a long log."""
    with (tmp_path / process.LOG).open("w") as log:
        log.write(events.join(0, "a", MET) + "\n")
        for _ in range(SIZE // len(LINE)):
            log.write(events.join(0, "a", LINE) + "\n")
        log.write(events.join(0, "a", events.encode("metrics", values={"loss": 1.0})) + "\n")
        log.write(events.join(0, "a", events.encode("exit", code=3, host="a")) + "\n")
    record = {"code": 1, "reason": "", "started": 1.0, "ended": 2.0}
    (tmp_path / process.EXIT).write_text(json.dumps(record))
    return ProcessHandle(
        run="r",
        attempt=1,
        host=socket.gethostname(),
        boot_id="another",
        pid=1,
        start_time=1.0,
        directory=str(tmp_path),
    )


def test_a_long_log_is_never_in_memory_as_a_whole(ended: ProcessHandle) -> None:
    watch, count, state = MachineWatch(context(), ended, None), 0, None
    tracemalloc.start()
    try:
        while state is None or not state.state.terminal:
            lines, state = watch.look()
            count += len(lines)
            assert watch.behind is not state.state.terminal
        seen = MachineDriver().observed_of(context(), ended)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < SIZE / 2
    assert count == SIZE // len(LINE) + 3
    assert (seen.world_size, seen.metrics) == (1, {"loss": 1.0})


def test_what_was_heard_is_not_read_again(ended: ProcessHandle) -> None:
    first = MachineDriver().observed_of(context(), ended)
    log = Path(ended.directory) / process.LOG
    with log.open("r+") as file:
        file.write("-" * 100)
    with log.open("a") as file:
        file.write(events.join(0, "a", events.encode("metrics", values={"f1": 2.0})) + "\n")
    again = MachineDriver().observed_of(context(), ended)
    assert first.failure is not None
    assert len(first.failure.last_lines) > 1
    assert again.series["f1"].values == [2.0]
    new = {"metrics": {"loss": 1.0, "f1": 2.0}, "series": again.series, "events": first.events + 1}
    assert again == first.model_copy(update=new)


@pytest.mark.parametrize("text", ["", "{", '{"offset": "far"}', "[]"])
def test_without_what_was_remembered_the_log_is_read_from_its_beginning(
    ended: ProcessHandle, text: str
) -> None:
    (Path(ended.directory) / ACTIVITY).write_text(text)
    assert MachineDriver().observed_of(context(), ended).metrics == {"loss": 1.0}


def test_a_supervisor_that_does_not_keep_its_deadline_is_not_waited_for_for_ever(
    ended: ProcessHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(ended.directory) / process.EXIT).unlink()
    own = psutil.Process()
    alive = {"pid": os.getpid(), "boot_id": process.boot_id(), "start_time": own.create_time()}
    monkeypatch.setattr(wait, "_LATE_S", -60.0)
    with pytest.raises(DeadlineError, match=f"process {os.getpid()}.* is left as it is") as caught:
        MachineWatch(context(), ended.model_copy(update=alive), None).look()
    assert caught.value.field == "run.run_timeout"
