"""A function becomes a module by its source; what cannot run in ranks is refused by name."""

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manycpu.operators.function_source import module_source
from manycpu.pipeline.spec.errors import BadInputError

FILE = '''
from __future__ import annotations

import json
import math, os.path
import os
import statistics as numbers
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache

FACTOR = 2
FACTORS = {"two": FACTOR, "four": FACTOR * FACTOR, **{}}
UNUSED = open
NOW: float = 1.5


@dataclass
class Point:
    """A point."""

    x: int = FACTOR

    def doubled(self) -> int:
        return self.x * FACTORS["two"]


@cache
def deep(n: int) -> int:
    return 0 if n == 0 else 1 + deep(n - 1)


def mean(values: list[float]) -> float:
    return numbers.mean(values)


def task(function):
    return function


@task
def fit(lr: float, *rest: int, names: Missing = ("a", "a")) -> dict[str, float]:
    """Train: with \\'quotes\\' and a backslash \\\\."""
    # Anything but that.
    point, inner = Point(), [name for name in names]
    text = """
  not indented
"""

    def nested(x):
        return x + point.x

    return {
        "lr": lr, "mean": mean([NOW, 2.5]), "doubled": point.doubled(), "deep": deep(3), "text": text,
        "count": Counter(inner)["a"], "nested": nested(1), "e": round(math.e), "sep": os.path.sep,
        "rest": sum(rest),
    }


def around():
    @task
    def fit(lr: float):
        text = """
at the edge
"""
        return FACTOR * lr, text

    return fit


def enclosing(secret, other):
    def fit():
        return secret + other

    return fit
'''


def imported(text: str, folder: Path, name: str = "dag_file") -> ModuleType:
    """Import a DAG file's text."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{name}_{abs(hash(str(path)))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def executed(source: str, folder: Path, **arguments: Any) -> Any:
    """Run a module as rank 0 does; what it tells that it returned."""
    program = folder / "program.py"
    program.write_text(source)
    given = json.dumps({"arguments": arguments, "places": []})
    done = subprocess.run([sys.executable, program, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.split("::manycpu:: ")[-1])
    return json.loads(told["text"])


def refused(function: Callable[..., Any], foreign: tuple[str, ...] = ()) -> str:
    with pytest.raises(BadInputError) as error:
        module_source(function, foreign)
    assert error.value.field
    assert error.value.fix
    return str(error.value)


def test_what_a_function_uses_goes_with_it_and_nothing_else(tmp_path: Path) -> None:
    source = module_source(imported(FILE, tmp_path).fit)
    value = executed(source, tmp_path, lr=0.5, rest=[1, 2])
    numbers = {"lr": 0.5, "mean": 2.0, "doubled": 4, "deep": 3, "count": 2, "nested": 3, "e": 3, "rest": 3}
    assert value == numbers | {"text": "\n  not indented\n", "sep": "/"}
    assert "deque" not in source
    assert "UNUSED" not in source
    assert "import json\n" not in source
    assert "@task" not in source
    assert source.index("from __future__") < source.index("import math") < source.index("FACTOR = 2")


def test_a_function_within_another_stands_by_itself(tmp_path: Path) -> None:
    source = module_source(imported(FILE, tmp_path).around())
    assert executed(source, tmp_path, lr=2) == [4, "\nat the edge\n"]
    assert "dataclass" not in source


def test_the_module_is_the_same_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    first = module_source(imported(FILE, tmp_path).around())
    second = module_source(imported(f"# moved\n\n{FILE}\nMORE = 1\n", tmp_path, "other").around())
    assert first == second


def test_a_closure_is_refused_with_its_names(tmp_path: Path) -> None:
    assert "`other`, `secret` of the function around it (a closure)" in refused(
        imported(FILE, tmp_path).enclosing(1, 2)
    )


def test_what_is_no_plain_function_is_refused() -> None:
    def wrapped() -> None: ...

    def generator() -> Any:
        yield 1

    async def waiting() -> None: ...

    assert "a lambda has no source of its own" in refused(lambda: None)
    assert "it is no function" in refused(functools.partial(print))
    assert "it is no function" in refused(dict)
    assert "another decorator has wrapped it" in refused(functools.wraps(wrapped)(lambda: None))
    assert "a generator or async" in refused(generator)
    assert "a generator or async" in refused(waiting)


def test_a_function_without_a_file_is_refused() -> None:
    names: dict[str, Any] = {}
    exec("def fit(): return 1", names)  # noqa: S102 - that is the case
    assert "its source cannot be read" in refused(names["fit"])


REFUSED = {
    "nowhere": ("return nowhere(1)", "it uses `nowhere`, which is not defined"),
    "file": ("return __file__", "`__file__`, which would be another file in the ranks"),
    "made": ("return PATH", "`PATH`, which is made when the DAG file is read"),
    "twice": ("return TWICE", "`TWICE`, which is defined more than once"),
    "conditional": (
        "return GIVEN",
        "`GIVEN`, which is defined more than once, or on a condition",
    ),
    "guarded": ("return guarded.x", "`guarded`, which is defined more than once, or on a condition"),
    "two": ("return LEFT", "`LEFT`, which is made when the DAG file is read"),
    "star": ("return sqrt(4)", "`sqrt`, which is not defined at the top of the file by its name"),
    "beside": ("return beside.x", "`beside`, which is imported from beside the DAG file"),
    "from_beside": ("return thing", "`thing`, which is imported from beside the DAG file"),
    "airflow": ("return version", "`version`, which is of Airflow"),
    "indirect": ("return helper()", "it uses `nothing`, which is not defined"),
    "default": ("return 1", "it uses `missing`, which is not defined"),
}
BAD = """
from __future__ import annotations
from math import *
from pathlib import Path
from airflow import __version__ as version
try:
    import guarded
except ImportError:
    guarded = None
if True:
    GIVEN = 1
import beside
from beside import thing
PATH = Path("x")
TWICE = 1
TWICE = 2
LEFT, RIGHT = 1, 2

def helper():
    return nothing

def fit({parameters}):
    {body}
"""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_along_is_refused_by_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, words = REFUSED[case]
    (tmp_path / "beside.py").write_text("x = thing = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    text = BAD.format(parameters="lr=lambda: missing" if case == "default" else "", body=body)
    assert words in refused(imported(text, tmp_path).fit)


def test_parameters_of_airflows_context_are_refused_unless_they_are_given(tmp_path: Path) -> None:
    text = "def fit(lr, ds): return 1\ndef other(lr, ds='today'): return 1\n"
    module = imported(text, tmp_path)
    assert "ranks know nothing of Airflow's context, such as `ds`" in refused(module.fit, ("ds", "ti"))
    assert module_source(module.other, ("ds", "ti"))


@pytest.mark.parametrize(
    "change",
    [
        "TABLE['lr'] = 2",
        "TABLE.update(lr=2)",
        "for number in range(2):\n    TABLE[number] = 1",
        "del TABLE['a']",
        "TABLE['a'] += 1",
        "Kept.x = 5",
        "def change():\n    TABLE['b'] = 1\nchange()",
    ],
)
def test_what_is_changed_after_its_definition_is_refused(change: str, tmp_path: Path) -> None:
    """The ranks would have it as it is written down, and nobody would notice."""
    text = f"TABLE = {{'a': 1}}\nclass Kept:\n    x = 1\ndef fit():\n    return TABLE, Kept\n{change}\n"
    assert "is changed after its definition (" in refused(imported(text, tmp_path).fit)


def test_what_stands_beside_the_file_is_refused_also_within_the_function(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "yaml").mkdir()  # data of that name: the library is imported all the same
    module = imported(
        "def fit():\n    import beside\ndef other():\n    import yaml\n    return yaml\n", tmp_path
    )
    assert "`beside`, which is imported from beside the DAG file" in refused(module.fit)
    assert "import yaml" in module_source(module.other)


def test_what_only_looks_at_a_constant_changes_nothing(tmp_path: Path) -> None:
    text = "TABLE = {'a': 1}\nSIZE = len(TABLE)\ndef fit():\n    return TABLE\nassert TABLE.get('a')\n"
    assert "TABLE" in module_source(imported(text, tmp_path).fit)
