"""What a notebook's function returns comes by its value or its digest: what anybody prints runs no code."""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.helper_process import pod
from support.local_runs import on_this_machine
from support.notebooks import Cell, executed_by_name
from support.rank_launches import LIGHT
from support.waiting import processes_of, until

from manycpu.pipeline.node.function import _report
from manycpu.pipeline.notebook.cell import CellDisplay, Returned
from manycpu.pipeline.notebook.launch import launch
from manycpu.pipeline.pod.channel import Channel
from manycpu.pipeline.spec.errors import BadInputError, ClusterError, LeftBehindError, ManycpuError
from manycpu.pipeline.spec.event_types import ResultEvent, decode
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets.kubernetes import export
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper
from manycpu.pipeline.targets.machines.driver import MachineDriver
from manycpu.pipeline.verbs import all_verbs
from manycpu.pipeline.verbs.cleanup import cleanup

BEGIN = f"""
import atexit, base64, json, os, pathlib, pickle, time
from manycpu.pipeline import launch
light = {LIGHT!r}

class Runs:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("code was run").absolute(),)

def forged():
    text = base64.b64encode(pickle.dumps(Runs())).decode()
    old = {{"event": "pickled", "part": 1, "parts": 1, "text": text}}
    return [old, {{"event": "result", "sha256": 64 * "0"}}]

def write(file, *texts):
    with open(file, "w") as out:
        for event in texts:
            out.write(f"[rank 0 here] ::manycpu:: {{json.dumps(event)}}\\n")
            out.write(f"::manycpu:: {{json.dumps(event)}}\\n")

def write_once_told(file, *texts):
    log = pathlib.Path(os.environ["MANYCPU_OUTPUT"]).parent / "log"
    while '"event": "result"' not in log.read_text():  # the parent passes the true one on
        time.sleep(0.05)
    write(file, *texts)
"""
CELLS = {
    "printed": """
def prints():
    write("/dev/stdout", *forged())
    return {"honest": (1, 2)}

launch(prints, nproc_per_node=1, env=light)
""",
    "before": """
def writes_to_parent():
    write(f"/proc/{os.getppid()}/fd/1", *forged())
    return {"honest": (1, 2)}

launch(writes_to_parent, nproc_per_node=1, env=light)
""",
    "after": """
def writes_to_parent_at_its_end():
    atexit.register(write_once_told, f"/proc/{os.getppid()}/fd/1", *forged())
    return {"honest": (1, 2)}

launch(writes_to_parent_at_its_end, nproc_per_node=1, env=light)
""",
    "plain": "launch(lambda: {'a': [1, 0.5, None, 'é']}, nproc_per_node=1, env=light)",
    "long": "len(launch(lambda: 100_000 * ['long'], nproc_per_node=1, env=light))",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cell]]:
    folder = tmp_path_factory.mktemp("notebook")
    yield executed_by_name(BEGIN, CELLS, folder)
    assert not (folder / "code was run").exists()
    assert not [*folder.glob("home/runs/[!.]*")]
    until(lambda: not list(processes_of(folder)))


@pytest.mark.parametrize("cell", ["printed", "before"])
def test_what_a_function_printed_is_not_what_it_returned(cell: str, cells: dict[str, Cell]) -> None:
    assert cells[cell].value == "{'honest': (1, 2)}", cells[cell].error


def test_a_digest_of_no_file_is_an_error_and_runs_nothing(cells: dict[str, Cell]) -> None:
    assert "what the function returned is gone" in cells["after"].error


def test_plain_values_and_long_ones_come_back(cells: dict[str, Cell]) -> None:
    assert cells["plain"].value == "{'a': [1, 0.5, None, 'é']}", cells["plain"].error
    assert cells["long"].value == "100000", cells["long"].error


def told(value: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> ResultEvent:
    """Have a rank tell a value; its event."""
    _report(value, folder)
    (line,) = capsys.readouterr().out.splitlines()
    event = decode(line)
    assert isinstance(event, ResultEvent)
    return event


def come_back(event: ResultEvent, read: Callable[[str], bytes]) -> Any:
    """Return what the notebook makes of an event."""
    returned = Returned("Call again")
    returned.read(event, read)
    return returned.value()


@pytest.mark.parametrize("value", [None, True, 0, -0.5, "é😀", [1, [None]], {"a": {"b": []}}])
def test_plain_values_need_no_file(value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = told(value, tmp_path / RETURNED, capsys)
    assert come_back(event, lambda _: b"") == value
    assert not (tmp_path / RETURNED).exists()


SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    "value", [(1,), {1: 2}, float("nan"), {1, 2}, b"x", "\ud800", "x" * 5000, SELF], ids=type
)
def test_others_come_as_they_were(value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = told(value, tmp_path / RETURNED, capsys)
    assert repr(come_back(event, lambda name: (tmp_path / RETURNED / name).read_bytes())) == repr(value)


def test_a_file_that_was_changed_is_not_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "code was run",)

    event = told({1, 2}, tmp_path / RETURNED, capsys)
    with pytest.raises(ManycpuError, match="was changed since"):
        come_back(event, lambda _: pickle.dumps(Runs()))
    assert not (tmp_path / "code was run").exists()


@pytest.fixture
def runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process be a kernel; return the folder of its runs."""
    monkeypatch.chdir(tmp_path)
    return home / "runs"


Type = Callable[..., tuple[int, str]]


def launch_again(function: Callable[[], Any]) -> Any:
    """Launch a function, always under the same run id."""
    return launch(function, run_id="again", nproc_per_node=1, env=LIGHT)


class Killed(BaseException):
    """Ends a call as SIGKILL would."""


def cleanup_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(all_verbs, "_clean_up", raises)


@pytest.mark.parametrize("value", [{"accuracy": 0.93}, {"weights": b"x"}], ids=["plain", "file"])
def test_the_cell_of_a_kernel_that_was_killed_in_the_clean_up_returns_the_value_when_it_runs_again(
    value: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cleanup_raises(patch, Killed())
        with pytest.raises(Killed):
            launch_again(lambda: value)
    assert launch_again(lambda: value) == value
    assert [*runs.iterdir()] == []


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (LeftBehindError("a pod"), LeftBehindError),
        (ClusterError("no answer"), ClusterError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_an_error_of_the_clean_up_has_what_the_function_returned(
    raised: BaseException, shown: type[BaseException], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleanup_raises(monkeypatch, raised)
    with pytest.raises(shown) as error:
        launch_again(lambda: {"weights": b"x"})
    assert error.value.returned == {"weights": b"x"}  # type: ignore[attr-defined]
    assert "sys.last_value.returned" in error.value.__notes__[0]
    assert [*runs.iterdir()] != []


def test_a_value_that_cannot_be_unpickled_here_is_kept_until_it_can(runs: Path, tmp_path: Path) -> None:
    class NeedsFile:
        def __reduce__(self) -> Any:
            return Path.read_text, (tmp_path / "installed later",)

    with pytest.raises(ManycpuError, match=r"could not be read: .*run_id='again'") as error:
        launch_again(lambda: [NeedsFile()])
    (kept,) = runs.glob("[!.]*")
    assert str(kept) in str(error.value)
    (tmp_path / "installed later").write_text("there")
    assert launch_again(lambda: [NeedsFile()]) == ["there"]
    assert [*runs.iterdir()] == []


def test_a_value_whose_reading_fails_once_is_read_by_the_next_call(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts_calls() -> tuple[int, int]:
        with Path("calls").open("a") as file:
            file.write("called ")
        return 1, 2

    def unreadable(*_: Any) -> bytes:
        raise ClusterError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(MachineDriver, "read_returned", unreadable)
        with pytest.raises(ManycpuError, match="could not be read: no answer"):
            launch_again(counts_calls)
    assert launch_again(counts_calls) == (1, 2)
    assert (tmp_path / "calls").read_text() == "called "
    assert [*runs.iterdir()] == []


@pytest.mark.parametrize("value", [1, (1, 2)], ids=["plain", "file"])
def test_a_kept_run_is_refused_and_its_earlier_result_is_not_returned_again(
    value: Any, runs: Path, manycpu: Type
) -> None:
    def writes_a_file() -> Any:
        Path(os.environ["MANYCPU_OUTPUT"], "file").write_text("x")
        return value

    assert launch_again(writes_a_file) == value
    (kept,) = runs.glob("[!.]*")
    for _ in range(2):
        with pytest.raises(BadInputError, match="has trained already") as error:
            launch_again(lambda: 2)
        assert f"manycpu clean {kept.name} --delete-model" in str(error.value)
    assert manycpu("clean", kept.name, "--delete-model", "--yes")[0] == 0
    assert launch_again(lambda: 2) == 2


def test_a_result_whose_file_is_deleted_is_gone_with_its_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cleanup_raises(patch, Killed())
        with pytest.raises(Killed):
            launch_again(lambda: (1, 2))
    (returned,) = runs.glob(f"*/attempts/*/{RETURNED}")
    shutil.rmtree(returned)
    with pytest.raises(ManycpuError, match="is gone"):
        launch_again(lambda: (1, 2))
    assert [*runs.iterdir()] == []


def test_clean_leaves_alone_a_result_that_could_not_be_read_until_its_time_is_over(
    runs: Path, manycpu: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any) -> bytes:
        raise ClusterError("no answer")

    for _ in range(2):  # the lease is over in between
        with monkeypatch.context() as patch:
            patch.setattr(MachineDriver, "read_returned", unreadable)
            with pytest.raises(ManycpuError, match="could not be read: no answer"):
                launch_again(lambda: (1, 2))
        (run,) = on_this_machine(runs.parent)
        assert "could not be read" in manycpu("clean", "--yes")[1]
        assert "could not be read" in (cleanup(run, keep=False).advice or "")  # type: ignore[union-attr]
        assert [*runs.glob(f"*/attempts/*/{RETURNED}/*")]
        run.ledger.keep(-1)
    assert manycpu("clean", "--yes")[0] == 0
    assert [*runs.iterdir()] == []


def test_a_display_that_fails_loses_no_value(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no front end")

    monkeypatch.setattr(CellDisplay, "event", fails)
    monkeypatch.setattr(CellDisplay, "_draw", fails)
    assert launch_again(lambda: (1, 2)) == (1, 2)
    assert [*runs.iterdir()] == []


class Here(Helper):
    """A helper whose pod is a process of this machine."""

    def __init__(self) -> None:
        self.name, self._progress, self._owned = "x", lambda *_: None, False

    def wait_ready(self) -> None:
        """Be ready at once."""

    def _talk(self, command: str, talk: Callable[[Channel], Any]) -> Any:
        with pod(command, progress=self.report) as (channel, _):
            return talk(channel)


def test_on_kubernetes_it_comes_from_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def helper(*_: Any) -> Iterator[Helper]:
        yield Here()

    monkeypatch.setattr(export, "helper", helper)
    monkeypatch.setattr(export, "with_volume_of", lambda ctx, *_: ctx)
    target = Kubernetes(claim="data", mount_path=str(tmp_path))
    ledger = SimpleNamespace(read=lambda: None)
    ctx: Any = SimpleNamespace(target=target, name="qa", key="key", ledger=ledger)
    handle: Any = SimpleNamespace(attempt=1)
    content = b"pickled"
    name = hashlib.sha256(content).hexdigest()
    with pytest.raises(FileNotFoundError):
        export.read_returned(ctx, handle, name)
    returned = tmp_path / "manycpu/runs/qa/attempts/1" / RETURNED
    returned.mkdir(parents=True)
    (returned / name).write_bytes(content)
    assert export.read_returned(ctx, handle, name) == content
