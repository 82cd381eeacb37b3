"""Records of a run that are cut or edited: they are read or named, and nothing is deleted unread."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import event, given
from hypothesis import strategies as st
from support.drawn import drawn, json_values

from manycpu.pipeline import run_report
from manycpu.pipeline.adapters import process
from manycpu.pipeline.cli import cli
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.base import from_annotations, to_annotations
from manycpu.pipeline.ledger.configmap import _data, _entry
from manycpu.pipeline.spec import events, exit_records
from manycpu.pipeline.spec.errors import LedgerError, ManycpuError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.attempt import attempt_of
from manycpu.pipeline.targets.context import Built, RunContext, Staged
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import pack, unpack
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.prepare import prepare

RECORDS = (
    "ledger.json",
    "lease.json",
    "attempts/1/handle.json",
    "attempts/1/exit.json",
    "attempts/1/heard.json",
)
NAMED = RECORDS[:-1]  # heard.json only saves time
EXITS = "attempts/1/exits/m/0.json"


def begin(folder: Path) -> RunContext:
    """Begin a run whose training ended well without a process that exported its model; its lease is over."""
    fields = {"program": "x.py", "output": str(folder / "out"), "nproc_per_node": 1}
    ctx = open_context(fields, {"directory": str(folder / "home")}, "a", base=folder)
    ctx.ledger.open(ctx.new_entry(time.time()))
    attempt = Path(ctx.where) / "attempts" / "1"
    (attempt / "output").mkdir(parents=True)
    (attempt / "output" / "model.bin").write_text("learned")
    handle = process.handle_of_this_process(attempt, ctx.name, 1).model_copy(update={"start_ticks": 1})
    process.write_json(attempt / process.HANDLE, handle.model_dump(mode="json"))
    process.write_json(attempt / process.EXIT, {"code": 0, "reason": "", "started": 0.0, "ended": 1.0})
    proof = events.encode("proof", rank=0, world_size=1, host="a", meeting="m")
    end = events.encode("exit", rank=0, code=0, host="a", meeting="m")
    (attempt / process.LOG).write_text("".join(f"{events.join(0, 'a', line)}\n" for line in (proof, end)))
    record = {"meeting": "m", "rank": 0, "host": "a", "world_size": 1, "code": 0, "time": 1.0}
    exit_records.write(attempt / exit_records.FOLDER, record | {"lines": [proof, end]})
    with ctx.ledger.update() as entry:
        entry.attempt = 1
        entry.attempts[1] = attempt_of(ctx, Staged(), Built(code=None, program=("x.py",), digest="1"))
    ctx.ledger.change_lease(until=0, ended=True)
    run_of(ctx, "status")  # writes what was read of the log
    return ctx


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return begin(tmp_path_factory.mktemp("run"))


def run_of(ctx: RunContext, *words: str) -> str:
    """Type a command for the runs of a folder; return what it printed, an error of manycpu too."""
    result = CliRunner().invoke(cli, [*words, "--directory", str(ctx.driver.home(ctx))])
    if result.exception and not isinstance(result.exception, (ManycpuError, SystemExit)):
        raise result.exception
    return result.output + str(result.exception or "")


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from paths(each, (*path, key))


def edited(content: Any, data: st.DataObject) -> Any:
    """Replace or remove one value of a JSON value."""
    content = json.loads(json.dumps(content))
    *around, last = data.draw(st.sampled_from([*paths(content)]))
    place = content
    for key in around:
        place = place[key]
    if data.draw(st.booleans()):
        place[last] = data.draw(json_values)
    else:
        del place[last]
    return content


def cut(whole: bytes, data: st.DataObject) -> bytes:
    """Cut a text somewhere; what is drawn does not depend on its length, which differs each time."""
    return whole[: data.draw(st.integers(0, 9999)) % len(whole.rstrip())]


def look(ctx: RunContext) -> str:
    """Have every command look at the run that may delete it: `clean`, and the next run in its folder."""
    folder = ctx.driver.home(ctx)
    assert folder
    fields = {"program": "y.py", "output": str(folder / "other"), "nproc_per_node": 1}
    other = open_context(fields, {"directory": str(folder)}, "b", base=folder)
    said = run_of(ctx, "status") + run_of(ctx, "status", ctx.name) + run_of(ctx, "clean", "--yes")
    try:
        prepare(other)
    except ManycpuError as error:
        said += str(error)
    return said


@drawn(60)
@given(st.sampled_from([*RECORDS, EXITS]), st.data())
def test_a_record_that_is_cut_is_named_and_deletes_nothing(
    begun: RunContext, caplog: pytest.LogCaptureFixture, name: str, data: st.DataObject
) -> None:
    file = Path(begun.where) / name
    whole = file.read_bytes()
    file.write_bytes(cut(whole, data))
    caplog.clear()
    try:
        said = look(begun) + caplog.text
        assert (Path(begun.where) / "attempts/1/output/model.bin").read_text() == "learned"
        assert name not in NAMED or name.rpartition("/")[2] in said
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("created", ["NaN", "1e300", "-1e300"])
def test_a_run_that_began_at_a_time_that_is_none_is_named_by_status(
    begun: RunContext, caplog: pytest.LogCaptureFixture, created: str
) -> None:
    file = Path(begun.where) / "ledger.json"
    whole = file.read_text()
    file.write_text(json.dumps(json.loads(whole) | {"created": float(created)}))
    try:
        assert f"{file} cannot be read" in run_of(begun, "status") + caplog.text
    finally:
        file.write_text(whole)


@drawn(120)
@given(st.sampled_from([*RECORDS, EXITS]), st.data())
def test_a_record_that_is_edited_is_read_or_refused(
    begun: RunContext, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = Path(begun.where)
    saved = tmp_path_factory.mktemp("saved") / "run"
    shutil.copytree(folder, saved)
    file = folder / name
    try:
        file.write_text(json.dumps(edited(json.loads(file.read_bytes()), data)))
        look(begun)
        event("removed" if not folder.exists() else "there")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        saved.rename(folder)


@drawn(200)
@given(st.data())
def test_a_configmap_that_is_edited_is_read_or_named(begun: RunContext, data: st.DataObject) -> None:
    written = _data(begun.ledger.read())
    key = data.draw(st.sampled_from([*written]))
    value = data.draw(st.none() | st.text(max_size=5) | json_values.map(json.dumps))
    written[key] = cut(written[key].encode(), data).decode() if value is None else value
    configmap = {"metadata": {"namespace": "ml", "name": begun.name}, "data": written}
    try:
        assert isinstance(_entry(configmap), Entry)
    except LedgerError as error:
        assert f"ml/{begun.name}" in str(error)  # noqa: PT017 - others may be read


@drawn(200)
@given(st.data())
def test_a_lease_in_annotations_that_is_edited_is_no_lease_that_is_over(data: st.DataObject) -> None:
    holder = ProcessHandle(run="a", attempt=1, host="h", boot_id="b", pid=1, start_time=0.0, directory="/")
    written = to_annotations(until=10.0, ended=False, kept=True, holder=holder)
    key = data.draw(st.sampled_from([*written]))
    text = data.draw(st.text(max_size=5) | json_values.map(json.dumps))
    lease = from_annotations({"annotations": written | {key: text}})
    if lease.over(9.0):
        assert float(text) <= 9.0  # it says so


@drawn(300)
@given(st.data())
def test_a_report_of_any_content_is_a_report_or_none(begun: RunContext, data: st.DataObject) -> None:
    whole = run_report.as_json(run_report.draft(begun.ledger.read(), Observed(), RunState.SUCCEEDED))
    is_cut = data.draw(st.booleans())
    text = cut(whole.encode(), data).decode() if is_cut else json.dumps(edited(json.loads(whole), data))
    read = run_report.parse(text)
    if read is not None:
        assert run_report.parse(run_report.as_json(read)) is not None
        assert json.dumps(run_report.compact(read))


@drawn(200)
@given(st.data())
def test_the_packed_state_of_an_attempt_is_read_or_refused(data: st.DataObject) -> None:
    fields = {
        "attempt": 1,
        "observed": {"rounds": [{"round": 0, "ranks": [0, 1]}], "warnings": ["x" * 40_000]},
    }
    packed = pack(fields)
    assert unpack(packed) == fields
    changed = edited(packed, data) if data.draw(st.booleans()) else packed | {"packed": packed["packed"][:-7]}
    with suppress(ValueError):
        unpack(changed)
