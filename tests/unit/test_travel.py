"""What a notebook's function takes along, what is named where it cannot travel, and which paths it uses."""

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from manycpu.pipeline.functions import pickled
from manycpu.pipeline.functions.pickled import Call, dumps, is_held
from manycpu.pipeline.node import function as function_of_node
from manycpu.pipeline.node.function import FUNCTION, NOTES
from manycpu.pipeline.notebook.cell import Returned, curve
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError
from manycpu.pipeline.spec.event_types import ResultEvent, decode
from manycpu.pipeline.spec.observed import Series
from manycpu.pipeline.spec.output import RETURNED

CELL = """
import os
import mine
from functools import wraps

names, other, root = ["a", "b"], object(), "../images"

class Base:
    def read(self):
        return open(os.path.join(root, names[0]))

class Data(Base):
    pass

def outer(scale=names):
    import lazily
    inner = 3
    def loop(x):
        return [Data() for _ in names], inner, scale, mine, "{absolute}"
    return loop

loop = outer()
"""


OBJECTS = """
import mine_of_objects as mine

class Of:
    def __init__(self, kept):
        self.kept = kept

    @property
    def name(self):
        return mine.__name__

def direct():
    return mine.__name__

def takes():
    return value

"""
CACHED = """
import functools
from mine_cached import tripled

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.lru_cache(maxsize=7)
def both(n):
    return fibonacci(n), tripled(n)

def train():
    return both(10)
"""


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Execute a cell in a folder, as `__main__`."""
    (tmp_path / "mine.py").write_text("import deeper\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "__init__.py").write_text("import os")
    (tmp_path / "lazily.py").touch()
    (tmp_path / "unused.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL.replace("{absolute}", str(tmp_path / "mine.py")), "cell", "exec"), variables)  # noqa: S102
    yield variables
    for name in ("mine", "deeper", "lazily"):
        sys.modules.pop(name, None)


class Reader:
    """Leaves its lock behind, and makes another where it arrives."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


class Holder:
    """Travels as it is, and cannot: it holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


def names(function: Any, *args: Any) -> set[str]:
    return {name for name, _ in Call(function, args).variables}


def test_what_a_function_uses_goes_along_and_nothing_else(cell: dict[str, Any]) -> None:
    found = names(cell["loop"], 7)
    assert {"args[0]", "Data", "names", "inner", "Base (which Data uses)"} <= found
    assert {"read (which Base uses)", "root (which read uses)"} <= found
    assert not any("other" in name or "wraps" in name for name in found)


def test_a_partial_and_a_method_take_what_they_hold(cell: dict[str, Any]) -> None:
    assert {"args[0]", "y", "loop"} <= names(partial(cell["loop"], 1, y=2))
    assert {"self", "Base (which Data uses)"} <= names(cell["Data"]().read)


def test_a_lock_that_is_held_is_named_wherever_it_is(tmp_path: Path) -> None:
    held = threading.RLock()
    assert held.acquire()
    call = Call(len, ([1, 2], {"a": [1, {"b": held}]}))
    with pytest.raises(BadInputError, match=r"`args\[1\]\['a'\]\[1\]\['b'\]` is a lock that is held"):
        pickled.write(tmp_path, call, base=tmp_path, data=None, same_machine=True)


def test_what_an_object_leaves_behind_by_itself_is_no_reason_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("travels")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler()])  # each has a lock
    pickled.write(tmp_path, Call(len, ([log, Reader()],)), base=tmp_path, data=None, same_machine=True)
    _, ((arrived, reader),) = pickle.loads((tmp_path / FUNCTION).read_bytes())  # noqa: S301 - our own
    assert arrived is log
    assert reader.lock.acquire(blocking=False)


def test_a_free_lock_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    """As a forked process has one of its own; also one of the package filelock, which was used before."""
    of_files = FileLock(tmp_path / "x.lock", timeout=3)
    with of_files:
        assert is_held(of_files)
        with pytest.raises(TypeError):
            dumps(of_files)
    locks = [threading.Lock(), threading.RLock(), of_files]
    arrived = pickle.loads(dumps(locks))  # noqa: S301 - our own
    assert [type(lock) for lock in arrived] == [type(lock) for lock in locks]
    assert (arrived[2].lock_file, arrived[2].timeout) == (of_files.lock_file, 3)
    for lock, original in zip(arrived, locks, strict=True):
        assert lock is not original
        assert lock.acquire()
        assert (is_held(lock), is_held(original)) == (True, False)
        lock.release()
    assert is_held("no lock") is None


def test_what_an_object_cannot_take_along_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"`args\[0\]\['held'\]\.lock` is a lock that is held"):
        pickled.write(tmp_path, Call(len, ({"held": Holder()},)), base=tmp_path, data=None, same_machine=True)


def test_modules_beside_the_notebook_go_along_with_what_they_import(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    script = pickled.write(folder, Call(cell["outer"]), base=tmp_path, data=None, same_machine=True)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    written.remove(".gitignore")
    assert written == {FUNCTION, NOTES, "outer-function.py", "mine.py", "deeper/__init__.py", "lazily.py"}
    assert script.name == "outer-function.py"


@pytest.mark.parametrize("value", ["[Of(mine.Row())]", "Of(direct)", "{1: direct}", "Of", "mine.Row().read"])
def test_modules_that_only_an_object_leads_to_go_along(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_objects.py").write_text("class Row:\n    def read(self):\n        return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(f"{OBJECTS}value = {value}", "cell", "exec"), variables)  # noqa: S102
    folder = _folder(tmp_path)
    pickled.write(folder, Call(variables["takes"]), base=tmp_path, data=None, same_machine=True)
    del sys.modules["mine_of_objects"]
    assert (folder / "mine_of_objects.py").exists()


def test_a_function_made_without_a_module_travels(tmp_path: Path) -> None:
    made = FunctionType((lambda: 7).__code__, {})
    folder = _folder(tmp_path)
    pickled.write(folder, Call(made), base=tmp_path, data=None, same_machine=True)
    arrived, _ = pickle.loads((folder / FUNCTION).read_bytes())  # noqa: S301 - our own
    assert arrived() == 7


def test_an_object_s_accelerator_is_named_before_anything_starts(tmp_path: Path) -> None:
    """It travels well, and each rank would train alone."""
    accelerator = type("Accelerator", (), {"__module__": "accelerate.accelerator"})
    trainer = SimpleNamespace(parts=[accelerator()])
    with pytest.raises(BadInputError, match=r"`args\[0\]\.parts\[0\]` is of Accelerate's Accelerator"):
        pickled.write(_folder(tmp_path), Call(len, (trainer,)), base=tmp_path, data=None, same_machine=True)


def test_paths_of_this_machine_are_named_unless_they_lead_to_the_data(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    base = tmp_path / "notebook"
    base.mkdir()
    mine = str(tmp_path / "mine.py")
    call = Call(cell["loop"], ("data", "/tmp", ".."))  # noqa: S108 - on every node
    found = pickled.paths_of_here(call, base, None)
    assert set(found) == {"../images", mine}
    assert "root" in found["../images"]
    staged = pickled.paths_of_here(Call(cell["loop"]), base, str(tmp_path / "images"))
    assert set(staged) == {mine}


@pytest.mark.parametrize(
    ("function", "args", "why_not"),
    [
        (list, (range(100_000),), None),
        (bytes, (64 << 20,), "takes 67,108,... bytes, of which 67,108,864 can travel"),
        (threading.Lock, (), "of type lock, cannot be pickled"),
    ],
)
def test_what_the_function_returns_comes_back_whole_or_says_why_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    why_not: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANYCPU_OUTPUT", str(tmp_path / "output"))
    pickled.write(tmp_path, Call(function, args), base=tmp_path, data=None, same_machine=True)
    function_of_node.call(tmp_path)
    (event,) = map(decode, capsys.readouterr().out.splitlines())
    assert isinstance(event, ResultEvent)
    returned = Returned("Call again")
    returned.read(event, lambda name: (tmp_path / RETURNED / name).read_bytes())
    if why_not is None:
        assert returned.value() == function(*args)
        return
    with pytest.raises(ManycpuError, match=f"the training succeeded, but .*{why_not}"):
        returned.value()


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ("/p/nb/data", "data/train.csv"),
        ("/p/nb/train.csv", "train.csv"),
        ("/p/other", "../other/nb/train.csv"),
        ("/p/nb", "train.csv"),
        ("/p", "../train.csv"),
        ("/p", "train.csv"),
        ("/", "../../nb/train.csv"),
    ],
)
def test_relative_paths_to_the_data_work_on_another_machine(
    data: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read() -> str:
        Path("written").touch()
        return Path(path).read_text()

    monkeypatch.chdir(tmp_path)
    staged = tmp_path / "staged"
    (staged / "nb").mkdir(parents=True)
    for folder in (staged, staged / "nb"):
        (folder / "train.csv").write_text("x")
    is_file = data.endswith(".csv")
    monkeypatch.setenv("MANYCPU_DATA", str(staged / "train.csv" if is_file else staged))
    monkeypatch.setenv("MANYCPU_OUTPUT", str(tmp_path / "output"))
    folder = _folder(tmp_path)
    pickled.write(folder, Call(read), base=Path("/p/nb"), data=data, same_machine=False)
    function_of_node.call(folder)
    assert '"value": "x"' in capsys.readouterr().out
    assert sorted(each.name for each in staged.rglob("*")) == ["nb", "train.csv", "train.csv"]


def test_data_that_the_function_overwrites_through_a_relative_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def overwrite() -> None:
        Path("train.csv").write_text("written")

    monkeypatch.chdir(tmp_path)
    staged = tmp_path / "staged"
    staged.mkdir()
    for name in ("train.csv", "test.csv"):
        (staged / name).write_text("x")
        os.utime(staged / name, (1, 1))
    monkeypatch.setenv("MANYCPU_DATA", str(staged))
    monkeypatch.setenv("MANYCPU_OUTPUT", str(tmp_path / "output"))
    folder = _folder(tmp_path)
    pickled.write(folder, Call(overwrite), base=Path("/p/nb"), data="/p/nb", same_machine=False)
    function_of_node.call(folder)
    assert "train.csv was written to the working folder" in capsys.readouterr().out


def _called_on_another_machine(tmp_path: Path, function: Callable[[], None]) -> int:
    """Call a function in a process of its own, as a rank on another machine does; returns its exit code."""
    folder = _folder(tmp_path)
    pickled.write(folder, Call(function), base=Path("/p/nb"), data=None, same_machine=False)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.environ["MANYCPU_OUTPUT"] = str(tmp_path / "output")
            os.chdir(tmp_path)
            with suppress(SystemExit):
                function_of_node.call(folder)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_killed_function_wrote_lies_in_the_folder_of_its_attempt(tmp_path: Path) -> None:
    def write() -> None:
        Path("weights").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    assert _called_on_another_machine(tmp_path, write) == -signal.SIGTERM
    assert [path.name for path in tmp_path.glob("manycpu-*/p/nb/*")] == ["weights"]


def test_a_child_of_a_function_ends_without_the_folder_of_its_parent(tmp_path: Path) -> None:
    def fork() -> None:
        if (pid := os.fork()) == 0:
            sys.exit(0)
        os.waitpid(pid, 0)
        Path("written").touch()

    assert _called_on_another_machine(tmp_path, fork) == 0
    assert not list(tmp_path.glob("manycpu-*"))


def test_too_much_to_take_along_is_named_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "_MAX_BYTES", 1000)
    with pytest.raises(BadInputError, match=r"args\[1\] \(2\.0 kB\)"):
        pickled.write(tmp_path, Call(len, (1, bytes(2000))), base=tmp_path, data=None, same_machine=True)


def _series(*points: tuple[int, float]) -> Series:
    series = Series()
    for step, value in points:
        series.add(step, 0.0, value)
    return series


def test_a_curve_is_drawn_from_two_points_on() -> None:
    assert curve(_series((1, 2.0))) == ""
    assert 'points="0.0,0.0 480.0,120.0"' in curve(_series((1, 2.0), (5, 1.0)))
    assert "nan" not in curve(_series((1, 2.0), (2, 2.0)))


def test_a_cached_function_travels_without_its_cache_and_brings_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import functools\n\n@functools.cache\ndef tripled(n):\n    return 3 * n\n"
    (tmp_path / "mine_cached.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CACHED, "cell", "exec"), variables)  # noqa: S102
    call = Call(variables["train"])
    assert variables["both"](10) == (55, 30)
    written = pickled.write(_folder(tmp_path), call, base=tmp_path, data=None, same_machine=True)
    assert (written.parent / "mine_cached.py").exists()
    function, args = pickle.loads(dumps((call.function, call.args)))  # noqa: S301
    both = function.__globals__["both"]
    assert (both.cache_info().currsize, both.cache_parameters()["maxsize"]) == (0, 7)
    assert function(*args) == (55, 30)
    assert function.__globals__["both"].__wrapped__.__globals__["fibonacci"].cache_info().currsize == 11


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "written"
    folder.mkdir()
    return folder


def test_training_arguments_of_a_cell_know_the_ranks_of_the_process_that_reads_them(tmp_path: Path) -> None:
    from accelerate import PartialState
    from transformers import TrainingArguments

    arguments = dumps(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    vars(PartialState())["num_processes"] = 2  # what all states of a process share
    try:
        assert pickle.loads(arguments).world_size == 2  # noqa: S301 - our own
    finally:
        PartialState._reset_state()  # noqa: SLF001 - there is no other way
