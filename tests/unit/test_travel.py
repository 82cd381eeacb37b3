"""What a notebook's function takes along, what is named where it cannot travel, and which paths it uses."""

import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.node import function as function_of_node
from manycpu.pipeline.node.function import FUNCTION, NOTES
from manycpu.pipeline.notebook import payload, travel
from manycpu.pipeline.notebook.block import curve
from manycpu.pipeline.notebook.returned import Returned
from manycpu.pipeline.notebook.travel import Call
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError
from manycpu.pipeline.spec.event_types import decode

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
    """Travels as it is, and cannot: it has a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def names(function: Any, *args: Any) -> set[str]:
    return {variable.name for variable in Call(function, args).variables}


def test_what_a_function_uses_goes_along_and_nothing_else(cell: dict[str, Any]) -> None:
    found = names(cell["loop"], 7)
    assert {"args[0]", "Data", "names", "inner", "Base (which Data uses)"} <= found
    assert {"read (which Base uses)", "root (which read uses)"} <= found
    assert not any("other" in name or "wraps" in name for name in found)


def test_a_partial_and_a_method_take_what_they_hold(cell: dict[str, Any]) -> None:
    assert {"args[0]", "y", "loop"} <= names(partial(cell["loop"], 1, y=2))
    assert {"self", "Base (which Data uses)"} <= names(cell["Data"]().read)


def test_a_lock_is_named_wherever_it_is() -> None:
    inside = travel.Variable("settings", {"a": [1, {"b": threading.RLock()}]})
    assert travel.culprit(inside, travel.anywhere(travel.reason_to_stay)) == (
        "settings['a'][1]['b']",
        "is a lock",
    )
    assert travel.culprit(travel.Variable("numbers", [1, 2]), travel.reason_to_stay) is None


def test_what_an_object_leaves_behind_by_itself_is_no_reason_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("travels")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler()])  # each has a lock
    payload.write(tmp_path, Call(len, ([log, Reader()],)), base=tmp_path, data=None, same_machine=True)
    _, ((arrived, reader),) = pickle.loads((tmp_path / FUNCTION).read_bytes())  # noqa: S301 - our own
    assert arrived is log
    assert reader.lock.acquire(blocking=False)


def test_what_an_object_cannot_take_along_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"`args\[0\]\['held'\]\.lock` is a lock"):
        payload.write(tmp_path, Call(len, ({"held": Holder()},)), base=tmp_path, data=None, same_machine=True)


def test_modules_beside_the_notebook_go_along_with_what_they_import(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    script = payload.write(folder, Call(cell["outer"]), base=tmp_path, data=None, same_machine=True)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    written.remove(".gitignore")
    assert written == {FUNCTION, NOTES, "outer-function.py", "mine.py", "deeper/__init__.py", "lazily.py"}
    assert script.name == "outer-function.py"


def test_paths_of_this_machine_are_named_unless_they_lead_to_the_data(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    base = tmp_path / "notebook"
    base.mkdir()
    mine = str(tmp_path / "mine.py")
    call = Call(cell["loop"], ("data", "/tmp", ".."))  # noqa: S108 - on every node
    found = payload.paths_of_here(call, base, None)
    assert set(found) == {"../images", mine}
    assert "root" in found["../images"]
    staged = payload.paths_of_here(Call(cell["loop"]), base, str(tmp_path / "images"))
    assert set(staged) == {mine}


@pytest.mark.parametrize(
    ("function", "args", "why_not"),
    [
        (list, (range(100_000),), None),
        (bytes, (1 << 20,), "takes 1,048,... bytes, of which 1,048,576 can travel"),
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
    payload.write(tmp_path, Call(function, args), base=tmp_path, data=None, same_machine=True)
    function_of_node.call(tmp_path)
    returned = Returned()
    for line in capsys.readouterr().out.splitlines():
        event = decode(line)
        assert event is not None
        returned.take(event.model_dump())
    if why_not is None:
        assert returned.value() == function(*args)
        return
    with pytest.raises(ManycpuError, match=f"the training succeeded, but .*{why_not}"):
        returned.value()


def test_too_much_to_take_along_is_named_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_LARGEST", 1000)
    with pytest.raises(BadInputError, match=r"args\[1\] \(2\.0 kB\)"):
        payload.write(tmp_path, Call(len, (1, bytes(2000))), base=tmp_path, data=None, same_machine=True)


def test_a_curve_is_drawn_from_two_points_on() -> None:
    assert curve([(1, 2.0)]) == ""
    assert 'points="0.0,0.0 480.0,120.0"' in curve([(1, 2.0), (5, 1.0)])
    assert "nan" not in curve([(1, 2.0), (2, 2.0)])
