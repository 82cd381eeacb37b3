"""A function becomes a module by its source; what cannot run in ranks is refused by name."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manycpu.pipeline.functions.source import function_module
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
        function_module(function, foreign)
    assert error.value.field
    assert error.value.fix
    return str(error.value)


def test_the_text_of_the_dag_file_is_refused_by_its_name(tmp_path: Path) -> None:
    fit = imported('"""Text."""\n\ndef fit():\n    return __doc__\n', tmp_path).fit
    assert "`__doc__`, which is the text of the DAG file" in refused(fit)


def test_what_a_function_uses_goes_with_it_and_nothing_else(tmp_path: Path) -> None:
    source = function_module(imported(FILE, tmp_path).fit).source
    value = executed(source, tmp_path, lr=0.5, rest=[1, 2])
    numbers = {"lr": 0.5, "mean": 2.0, "doubled": 4, "deep": 3, "count": 2, "nested": 3, "e": 3, "rest": 3}
    assert value == numbers | {"text": "\n  not indented\n", "sep": "/"}
    assert "deque" not in source
    assert "UNUSED" not in source
    assert "import json\n" not in source
    assert "@task" not in source
    assert source.index("from __future__") < source.index("import math") < source.index("FACTOR = 2")


def test_a_function_within_another_stands_by_itself(tmp_path: Path) -> None:
    source = function_module(imported(FILE, tmp_path).around()).source
    assert executed(source, tmp_path, lr=2) == [4, "\nat the edge\n"]
    assert "dataclass" not in source


def test_the_module_is_the_same_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    first = function_module(imported(FILE, tmp_path).around()).source
    second = function_module(imported(f"# moved\n\n{FILE}\nMORE = 1\n", tmp_path, "other").around()).source
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
    "shadowed": ("return pow(2, 3)", "`pow`, which is not defined at the top of the file by its name"),
    "patched": ("return beside.x", "`beside`, which is changed after it was imported (line 13)"),
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
beside.x = 2
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


@pytest.mark.parametrize(
    "change",
    [
        "beside.x, OTHER = 2, 3",
        "try:\n    import nothing_here\nexcept ImportError:\n    beside.x = 2",
        "match 1:\n    case 1:\n        beside.x = 2",
    ],
)
def test_an_import_that_is_changed_in_a_part_of_a_statement_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    text = f"import beside\n{change}\n\ndef fit(): return beside.x\n"
    assert "`beside`, which is changed after it was imported" in refused(imported(text, tmp_path).fit)


def test_parameters_of_airflows_context_are_refused_unless_they_are_given(tmp_path: Path) -> None:
    text = "def fit(lr, ds): return 1\ndef other(lr, ds='today'): return 1\n"
    module = imported(text, tmp_path)
    assert "ranks have no values of Airflow's context, such as `ds`" in refused(module.fit, ("ds", "ti"))
    assert function_module(module.other, ("ds", "ti")).source


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
    """The ranks would have it as the source says, without a message."""
    text = f"TABLE = {{'a': 1}}\nclass Kept:\n    x = 1\ndef fit():\n    return TABLE, Kept\n{change}\n"
    assert "is changed after its definition (" in refused(imported(text, tmp_path).fit)


def test_what_is_changed_out_of_sight_is_refused_with_what_differs(tmp_path: Path) -> None:
    """By a function that the file calls, by another name, or one by one: the source says nothing of it."""
    for number, (change, words) in enumerate(SILENT):
        function = imported(CHANGED.format(change=change), tmp_path, f"changed{number}").fit
        assert words in refused(function), change


CHANGED = """
import functools
from dataclasses import dataclass
from enum import Enum

class Config:
    lr = 0.1
    table = {{"a": [1]}}

    def rate(self, by=1):
        return self.lr * by

@dataclass
class Point:
    x: int = 1

class Hidden:
    __rate = 0.1

class Kind(Enum):
    FIRST = 1

@functools.cache
def helper(values=[]):
    return values

def other(self, by=1):
    return 0

LAYERS = {{"sizes": [1, 2]}}
NAMES = ("a", LAYERS)

def fit(steps=3):
    return Config().rate(), Point(), helper(), NAMES, LAYERS, Hidden, Kind

def change():
    {change}

change()
"""
SILENT = [
    ("setattr(Config, 'lr', 0.5)", "(Config.lr is 0.5, and is written as 0.1)"),
    ("alias = Config\n    alias.lr = 1", "(Config.lr is 1, and is written as 0.1)"),
    ("Config.table['a'].append(2)", "(Config.table['a'][1] is 2, and is written as missing)"),
    ("Config.rate = other", "Config.rate"),
    ("setattr(Config, 'rate', other)", "Config.rate"),
    ("Config.rate.__defaults__ = (2,)", "(Config.rate (its defaults)[0][0] is 2, and is written as 1)"),
    ("Config.momentum = 0.9", "(Config.momentum is 0.9, and is written as missing)"),
    ("Hidden._Hidden__rate = 1", "(Hidden._Hidden__rate is 1, and is written as 0.1)"),
    ("Kind.FIRST._value_ = 2", "_value_ is 2, and is written as 1)"),
    ("del Config.lr", "(Config.lr is missing, and is written as 0.1)"),
    ("Point.__init__ = lambda self: None", "Point.__init__"),
    ("helper.__wrapped__.__defaults__[0].append(1)", "`helper`, which is changed after its definition"),
    ("LAYERS['sizes'][0] = True", "(LAYERS['sizes'][0] is True, and is written as 1)"),
    ("NAMES[1]['more'] = 1", "is changed after its definition ("),
    ("fit.__defaults__ = (4,)", "it is changed after its definition (fit (its defaults)[0][0] is 4"),
    ("fit.__code__ = other.__code__", "so that it cannot run"),
]
EVALUATED = """
import os, re, time
from dataclasses import dataclass, field
from pathlib import Path

@dataclass(frozen=True)
class Point:
    x: int = field(default=3, repr=False)
    names: list = field(default_factory=list)
    seen: float = time.time_ns() / 7

class Kept:
    started = time.time_ns()
    __secret = time.time_ns()
    pattern = re.compile("a+")

    def since(self, begun=time.time_ns()):
        return begun, self.__secret

def helper(*, folder=os.environ.get("HOME", ""), table=dict(a=1)):
    return [folder, table]

def fit(moment=time.time_ns(), sizes=sorted({2, 1})):
    point = Point()
    kept = Kept()
    found = [repr(point), point.names, point.seen, kept.started, kept.since(), helper()]
    return [moment, sizes, bool(kept.pattern.match("aa")), *found]

def stays(path=Path("x")):
    return path
"""


def test_what_was_evaluated_when_the_file_was_read_travels_by_value(tmp_path: Path) -> None:
    """Each rank would have another moment, and another home."""
    module = imported(EVALUATED, tmp_path)
    assert executed(function_module(module.fit).source, tmp_path) == json.loads(json.dumps(module.fit()))
    assert "it uses `stays`, which has a default for `path` that is made when" in refused(module.stays)


def written_by_another_process(file: Path, **environ: str) -> str:
    """Write the module of a file's function in a process with other variables; return its text."""
    program = file.parent / "program.py"
    imports = "from pathlib import Path\nfrom manycpu.pipeline.functions.source import function_module\n"
    code = f"{imports}import {file.stem} as file\nfunction_module(file.fit).write(Path({str(program)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=file.parent, env={**os.environ, **environ}, check=True)
    return program.read_text("utf-8")


def test_each_process_writes_the_same_module(tmp_path: Path) -> None:
    """Its digest is that of the image: sets have another order in each."""
    file = tmp_path / "of_sets.py"
    file.write_text("def fit(names=set('abcdefgh')):\n    return names\n")
    assert len({written_by_another_process(file, PYTHONHASHSEED=str(seed)) for seed in (1, 2)}) == 1


def test_the_module_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    file = tmp_path / "of_texts.py"
    file.write_text("def fit():\n    return 'ü'\n", "utf-8")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "'ü'" in written_by_another_process(file, **ascii_alone)


def test_what_is_as_it_was_written_goes_along_whatever_it_is(tmp_path: Path) -> None:
    module = imported(KINDS, tmp_path)
    assert executed(function_module(module.fit).source, tmp_path) == module.fit() == EXPECTED


KINDS = """
from __future__ import annotations
import abc, enum, functools, math, threading, typing
from dataclasses import dataclass, field

T = 0.1

class Colour(enum.Enum):
    RED = enum.auto()
    BLUE = "b"

    @property
    def lower(self): return self.name.lower()

class Pair(typing.NamedTuple):
    left: int
    right: int = 2

class Base(abc.ABC):
    lock = threading.Lock()
    nan = float("nan")

    @abc.abstractmethod
    def size(self) -> int: ...

    @classmethod
    def made(cls): return cls()

    @functools.cached_property
    def kept(self): return [T]

class Sized(Base):
    def size(self) -> int:
        return super().__init__() or len(self.kept)

@dataclass(slots=True, order=True)
class Slotted:
    name: str = "a"
    more: dict = field(default_factory=dict)
    missing: float = math.nan

def twice(function):
    @functools.wraps(function)
    def inner(*args):
        return 2 * function(*args)
    return inner

@twice
def doubled(x): return x

@functools.lru_cache(maxsize=4)
def cached(x):
    if x: pass
    return x

@functools.singledispatch
def shown(x): return "any"

def fit():
    class Inner:
        def one(self): return 1
    return [Colour.RED.lower, Colour("b").name, Pair(1).right, Sized.made().size(), Slotted().more,
            doubled(2), cached(3), shown(1), Inner().one()]
"""
EXPECTED = ["red", "BLUE", 2, 1, {}, 4, 3, "any", 1]


def test_modules_of_the_dags_folder_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its root, which is on sys.path, from beside the DAG file, and what those import in turn."""
    team = tmp_path / "dags" / "team"
    for name, text in {
        "team/beside_of_all.py": "x = 1\n",
        "common_of_all/__init__.py": "from common_of_all.steps import step\n",
        "common_of_all/steps.py": "import below_of_all\ndef step(): return below_of_all.x\n",
        "common_of_all/table.csv": "1,2\n",
        "below_of_all.py": "x = 2\n",
        "unused_of_all.py": "",
        "yaml/data.csv": "",  # data of that name: the library is imported all the same
        "json.py": "raise SystemExit('not this one')\n",
    }.items():
        (tmp_path / "dags" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dags" / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "dags")])
    text = (
        "import json, yaml\nfrom common_of_all import step\ndef fit():\n    import beside_of_all\n"
        "    return json.dumps([beside_of_all.x, step(), yaml.__name__])\n"
    )
    module = function_module(imported(text, team).fit)
    for name in ("common_of_all", "common_of_all.steps", "below_of_all"):
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "ran").mkdir()
    module.write(tmp_path / "ran" / "program.py")
    files = sorted(str(one.relative_to(tmp_path / "ran")) for one in (tmp_path / "ran").rglob("[!.]*.*"))
    of_the_package = [f"common_of_all/{name}" for name in ("__init__.py", "steps.py", "table.csv")]
    assert files == ["below_of_all.py", "beside_of_all.py", *of_the_package, "program.py"]
    assert executed(module.source, tmp_path / "ran") == '[1, 2, "yaml"]'


ANNOTATED = """
import typing
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Text
from airflow import DAG
from pydantic import validate_call
if TYPE_CHECKING:
    from decimal import Decimal
UNUSED = Path("x")

@dataclass
class Config:
    version: <ClassVar[int]> = 2
    scale: <InitVar[float]> = 1.0
    path: <typing.Optional[Path]> = None
    _: KW_ONLY
    lr: <Decimal | DAG | UNUSED> = 0.1

    def __post_init__(self, scale):
        self.lr *= scale

@validate_call
def kind(value: Text):
    return value.upper()

def fit():
    hints = typing.get_type_hints(Config, localns=dict.fromkeys(["Decimal", "DAG", "UNUSED"], int))
    return [Config(4.0).lr, Config.version, str(hints["path"]), kind("a")]
"""


def annotated(*, as_text: bool) -> str:
    if as_text:
        return ANNOTATED.replace("<", "'").replace(">", "'")
    return "from __future__ import annotations\n" + ANNOTATED.replace("<", "").replace(">", "")


@pytest.mark.parametrize("as_text", [True, False])
def test_what_libraries_read_in_annotations_goes_along_and_may_stay_behind(
    as_text: bool, tmp_path: Path
) -> None:
    module = imported(annotated(as_text=as_text), tmp_path)
    source = function_module(module.fit).source
    assert executed(source, tmp_path) == module.fit()
    assert "import DAG" not in source
    assert "\nUNUSED =" not in source


def test_an_annotation_that_means_something_else_in_the_ranks_is_refused(tmp_path: Path) -> None:
    conditional = "Text\nif typing:\n    from typing import ClassVar"
    text = annotated(as_text=False).replace("ClassVar, Text", conditional)
    assert "`Config`, which is changed after its definition (" in refused(imported(text, tmp_path).fit)


NAMED_BY_ANNOTATIONS = """
from __future__ import annotations
import decimal, typing
from dataclasses import dataclass
from enum import Enum
from pydantic import BaseModel
from typing_extensions import TypedDict
from yaml import Node
decimal.DefaultContext.prec = 5

class Kind(Enum):
    SGD = "sgd"

class Warmup(TypedDict):
    steps: int

class Optim(BaseModel):
    kind: Kind = None
    warmup: "Warmup" = None

class Config(BaseModel):
    optim: Optim = None

@dataclass
class Options:
    config: typing.Optional[Config] = None

class Registry:
    items = []

class Shape(Node):
    pass

@dataclass
class Other:
    registry: Registry = None
    when: decimal.Decimal = None
    node: Node | Shape = None
    step: typing.Literal["prepare"] = "prepare"

def prepare():
    pass

def fit():
    optim = Config(optim={"kind": "sgd", "warmup": {"steps": 3}}).optim
    return [optim.kind.name, optim.warmup, str(typing.get_type_hints(Options)["config"].__args__[0])]

def fit_other():
    return [Other().step, Config().optim]
"""


def test_classes_that_only_annotations_name_go_along(tmp_path: Path) -> None:
    source = function_module(imported(NAMED_BY_ANNOTATIONS, tmp_path).fit).source
    assert executed(source, tmp_path) == ["SGD", {"steps": 3}, "<class '__main__.Config'>"]
    assert "Registry" not in source


def test_what_only_annotations_name_stays_behind_where_ranks_might_not_have_it(tmp_path: Path) -> None:
    source = function_module(imported(NAMED_BY_ANNOTATIONS, tmp_path).fit_other).source
    assert executed(source, tmp_path) == ["prepare", None]
    assert "class Registry" in source
    assert not re.search(r"import Node|class Shape|import decimal|def prepare", source)


def test_what_only_annotations_name_stays_behind_where_it_is_changed(tmp_path: Path) -> None:
    changed = f"{NAMED_BY_ANNOTATIONS}\ndef register():\n    Registry.items.append(1)\nregister()\n"
    source = function_module(imported(changed, tmp_path).fit_other).source
    assert "class Registry" not in source
    assert "from pydantic import BaseModel" in source


def test_one_statement_may_import_several_modules_of_a_package(tmp_path: Path) -> None:
    text = "import xml.dom, json, xml.sax\ndef fit():\n    return [xml.dom.__name__, xml.sax.__name__]\n"
    source = function_module(imported(text, tmp_path).fit).source
    assert executed(source, tmp_path) == ["xml.dom", "xml.sax"]
    assert "json" not in source


def test_a_class_attribute_may_have_the_name_of_a_global(tmp_path: Path) -> None:
    text = "lr = 0.5\nclass A:\n    lr = lr\n    half = lr / 2\ndef fit():\n    return [A.lr, A.half]\n"
    assert executed(function_module(imported(text, tmp_path).fit).source, tmp_path) == [0.5, 0.25]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no statement `type`")
def test_a_type_alias_goes_along(tmp_path: Path) -> None:
    text = "type Vec = list[int]\ndef fit(sizes: Vec = [1]) -> Vec:\n    return sizes\n"
    assert executed(function_module(imported(text, tmp_path).fit).source, tmp_path) == [1]


def test_a_star_import_of_the_builtins_replaces_none_of_them(tmp_path: Path) -> None:
    text = "from builtins import *\ndef fit():\n    return len([1])\n"
    assert executed(function_module(imported(text, tmp_path).fit).source, tmp_path) == 1


def test_what_only_looks_at_a_constant_changes_nothing(tmp_path: Path) -> None:
    text = "TABLE = {'a': 1}\nSIZE = len(TABLE)\ndef fit():\n    return TABLE\nassert TABLE.get('a')\n"
    assert "TABLE" in function_module(imported(text, tmp_path).fit).source
