"""Write a module from a function and what it uses of its file, so that ranks can run it elsewhere.

The module has the source of the imports, functions, classes and constants without calls that the function
uses, and of what those use in turn. Modules of the DAGs folder are copied as files. The module does not
depend on the function's arguments. Anything else is refused, and so is what was changed after its definition.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from manycpu.operators.definition_check import difference
from manycpu.operators.source_names import (
    Definition,
    bindings,
    globals_of,
    is_constant,
    is_future,
    line_of_change,
    line_of_patch,
    literal_of,
    may_vary,
    name_of,
    names_in,
)
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.program import copy_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["FunctionModule", "function_module"]

_ARGUMENT: Final = "give it as an argument"
_RESULT: Final = f"To have the result of a task, {_ARGUMENT}"
_CALL: Final = """
if __name__ == "__main__":
    from manycpu.pipeline.node.function_task import call

    call({name})
"""
_BUILTIN_NAMES: Final = frozenset(dir(builtins)) | {"__name__"}
# Libraries whose calls describe fields of classes.
_FIELD_LIBRARIES: Final = {"attr", "attrs", "dataclasses", "pydantic"}
_INSTALL_FOLDERS: Final = {"dist-packages", "site-packages"}
_CLASS_STATEMENTS: Final = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign),
    ast.Pass,
)


class FunctionModule(NamedTuple):
    """A function as a program."""

    source: str
    """The module's text, which depends only on the function and its file."""
    file: Path
    """The file that defines the function."""
    modules: frozenset[str]
    """Top-level names of the modules of the DAGs folder that it imports."""

    def write(self, program: Path) -> None:
        """Write the module, and copy the modules that it imports beside it."""
        program.write_text(self.source)
        copy_files({*self.modules}, lambda name: _root_of(name, self.file), program.parent)


def function_module(function: Callable[..., Any], foreign: Collection[str] = ()) -> FunctionModule:
    """Write the module that runs a function as a program.

    Args:
        function: A plain function, without the decorators of Airflow.
        foreign: Names of parameters that ranks have no value for: those of Airflow's context.

    Raises:
        BadInputError: The function cannot run elsewhere, uses something that cannot be copied, or was changed
            after its definition.
    """
    _demand_plain(function, foreign)
    tree, node = _parsed(function)
    node.decorator_list = []
    pieces = _Pieces(function, tree, node)
    body = [*(one for one in tree.body if is_future(one)), *pieces.imports, *pieces.others, node]
    _check_unchanged(function, pieces, body)
    source = "\n\n".join(map(ast.unparse, body)) + "\n\n" + _CALL.format(name=node.name)
    return FunctionModule(source, Path(function.__code__.co_filename), frozenset(pieces.modules))


def _check_unchanged(function: Callable[..., Any], pieces: _Pieces, body: list[ast.stmt]) -> None:
    """Execute the definitions a second time, and compare the results with what the function uses.

    Raises:
        BadInputError: They differ, or cannot be executed twice.
    """
    module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    again: dict[str, Any] = {"__name__": function.__module__}
    fix = f"Define it once, with its final value, or {_ARGUMENT}"
    try:
        # With the file's name and lines: code of other lines compares as different.
        exec(compile(module, function.__code__.co_filename, "exec", dont_inherit=True), again)  # noqa: S102 - the DAG file's own code
    except Exception as error:
        what = f"what it uses of its file cannot be defined a second time ({type(error).__name__}: {error})"
        raise _refusal(function, what, "Define that inside the function") from error
    names = names_in(module)
    own = function.__name__
    now = {name: function.__globals__[name] for name in pieces.defined if name in function.__globals__}
    for name, value in (now | {own: function}).items():
        if found := difference(name, value, again[name], names):
            if name == own:
                raise _refusal(function, f"it is changed after its definition ({found})", fix)
            what = f"it uses `{name}`, which is changed after its definition ({found})"
            raise _refusal(function, what, fix)


def _demand_plain(function: Callable[..., Any], foreign: Collection[str]) -> None:
    """Refuse what is no plain function, and parameters that only Airflow has values for."""
    if not inspect.isfunction(function):
        raise _refusal(function, "it is no function", "Decorate a function with `def`")
    if function.__name__ == "<lambda>":
        raise _refusal(function, "a lambda has no source of its own", "Write it as a function with `def`")
    if hasattr(function, "__wrapped__"):
        fix = "Put @task.manycpu directly above `def`, and apply the other decorator inside the function"
        raise _refusal(function, "another decorator has wrapped it", fix)
    if names := function.__code__.co_freevars:
        fix = f"Move that to the top of the file, or {_ARGUMENT}"
        listed = ", ".join(f"`{name}`" for name in names)
        raise _refusal(function, f"it uses {listed} of the function around it (a closure)", fix)
    if function.__code__.co_flags & (
        inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    ):
        raise _refusal(
            function, "it is a generator or async: a call would not run it", "Write a plain function"
        )
    for name, parameter in inspect.signature(function).parameters.items():
        if name in foreign and parameter.default in (parameter.empty, None):
            fix = f'Rename the parameter, and pass a template to it, such as day="{{{{ {name} }}}}"'
            raise _refusal(function, f"ranks know nothing of Airflow's context, such as `{name}`", fix)


def _parsed(function: Callable[..., Any]) -> tuple[ast.Module, ast.FunctionDef]:
    """Parse a function's file, and find the function in it."""
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError) as error:
        fix = "Write it into a file: code from exec or from a prompt has no source"
        raise _refusal(function, f"its source cannot be read ({error})", fix) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == function.__code__.co_firstlineno:
                return tree, node
    raise _refusal(function, "its source is not where Python says", "Give it a unique name")


class _Pieces:
    """The statements of its file that a function uses: ``imports`` and ``others``, in the file's order."""

    def __init__(self, function: Callable[..., Any], tree: ast.Module, node: ast.FunctionDef) -> None:
        self._function, self._bound, self._tree = function, bindings(tree), tree
        self._file = Path(function.__code__.co_filename)
        self.modules: set[str] = set()
        self._used: dict[str, list[ast.stmt]] = {node.name: []}
        self._future = [one for one in tree.body if is_future(one)]
        self._add_used_by(node, function)
        found = {id(one): one for ones in self._used.values() for one in ones}.values()
        ordered = sorted(found, key=lambda one: (one.lineno, one.col_offset, ast.unparse(one)))
        self.imports = [one for one in ordered if isinstance(one, ast.Import | ast.ImportFrom)]
        self.others = [one for one in ordered if not isinstance(one, ast.Import | ast.ImportFrom)]
        self.defined = [
            name for name, ones in self._used.items() if {*map(id, ones)} & {*map(id, self.others)}
        ]

    def _add_used_by(self, piece: ast.stmt, value: Any = None) -> None:
        """Add the statements that a statement uses, and those that they use in turn."""
        self._write_values(piece, value)
        for one in ast.walk(piece):
            if isinstance(one, ast.Import | ast.ImportFrom):
                for alias in one.names:
                    self._imported(name_of(alias), one)
        for name in globals_of([*self._future, piece]):
            if name not in self._used and (name in self._bound or name not in _BUILTIN_NAMES):
                self._used[name] = self._definitions(name)
                for one in self._used[name]:
                    self._add_used_by(one, self._function.__globals__.get(name))

    def _write_values(self, piece: ast.stmt, value: Any) -> None:
        """Replace calls in a definition by the values that they gave; ranks would evaluate them again."""
        if isinstance(piece, ast.FunctionDef | ast.AsyncFunctionDef):
            self._write_default_values(piece, value)
        if not isinstance(piece, ast.ClassDef):
            return
        members = vars(value) if isinstance(value, type) else {}
        for one in piece.body:
            is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if isinstance(one, Definition):
                self._write_values(one, members.get(one.name))
            elif not isinstance(one, _CLASS_STATEMENTS) and not is_text:
                what = f"has a statement in it that defines nothing (line {one.lineno})"
                raise self._refusal(piece.name, what, "Assign each of its attributes once")
            elif isinstance(one, ast.Assign | ast.AnnAssign) and one.value and may_vary(one.value):
                target = one.targets[0] if isinstance(one, ast.Assign) else one.target
                member = members.get(target.id) if isinstance(target, ast.Name) else None
                if member is None or self._describes_a_field(one.value):
                    continue
                if (written := literal_of(member)) is not None:
                    one.value = ast.copy_location(written, one.value)

    def _write_default_values(self, piece: ast.FunctionDef | ast.AsyncFunctionDef, value: Any) -> None:
        function = inspect.unwrap(value) if callable(value := getattr(value, "__func__", value)) else None
        known = inspect.signature(function).parameters if inspect.isfunction(function) else {}

        def with_value(argument: ast.arg, default: Any) -> Any:
            if default is None or not may_vary(default):
                return default
            if argument.arg in known and (written := literal_of(known[argument.arg].default)):
                return ast.copy_location(written, default)
            what = f"has a default for `{argument.arg}` that is made when the DAG file is read"
            raise self._refusal(
                piece.name, what, "Use None as the default, and make the value inside the function"
            )

        arguments = piece.args
        positional = [*arguments.posonlyargs, *arguments.args]
        last = positional[len(positional) - len(arguments.defaults) :]
        arguments.defaults = [*map(with_value, last, arguments.defaults)]
        arguments.kw_defaults = [*map(with_value, arguments.kwonlyargs, arguments.kw_defaults)]

    def _describes_a_field(self, value: ast.expr) -> bool:
        """Whether an expression calls a library for data classes, such as ``field()`` of dataclasses."""
        called = value.func if isinstance(value, ast.Call) else value
        try:
            code = compile(ast.Expression(called), "<piece>", "eval")
            found = eval(code, dict(self._function.__globals__))  # noqa: S307 - a name that the file has called itself
        except Exception:  # noqa: BLE001 - the name is no longer defined
            return False
        return str(getattr(found, "__module__", "")).partition(".")[0] in _FIELD_LIBRARIES

    def _definitions(self, name: str) -> list[ast.stmt]:
        """Find the statements that define a name of the file.

        Raises:
            BadInputError: There is none, or what the name stands for cannot be copied as source.
        """
        found = self._bound.get(name, [])
        imported = [one for one in found if isinstance(one, ast.Import | ast.ImportFrom)]
        if imported and len(imported) == len(found):
            return [self._imported(name, one) for one in imported]
        value = self._function.__globals__.get(name)
        if re.match(r"(airflow|manycpu\.operators)\b", type(value).__module__):
            raise self._refusal(name, "is an object of Airflow, such as a task or a DAG", _RESULT)
        if not found and name == "__file__":
            raise self._refusal(name, "would be another file in the ranks", f"To have a path, {_ARGUMENT}")
        if not found and name in self._function.__globals__:
            raise self._refusal(name, "is not defined at the top of the file by its name", "Define it there")
        if not found:
            raise self._refusal(name, "is not defined", "Define or import it at the top of the file")
        if len(found) > 1 or not isinstance(found[0], Definition | ast.Assign | ast.AnnAssign):
            fix = "Define it once, at the top of the file"
            raise self._refusal(name, "is defined more than once, or on a condition", fix)
        if isinstance(found[0], ast.Assign | ast.AnnAssign) and not is_constant(found[0]):
            fix = f"Make it inside the function, or {_ARGUMENT}"
            raise self._refusal(name, "is made when the DAG file is read, and is no plain constant", fix)
        if line := line_of_change(self._tree, name):
            fix = f"Define it once, with its final value, or {_ARGUMENT}"
            raise self._refusal(name, f"is changed after its definition (line {line})", fix)
        return found

    def _imported(self, name: str, statement: ast.Import | ast.ImportFrom) -> ast.stmt:
        """Return an import of one name only, of all that a statement imports.

        Raises:
            BadInputError: Ranks cannot import it.
        """
        alias = next(one for one in statement.names if name_of(one) == name)
        module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else alias.name
        top = module.partition(".")[0]
        if top == "airflow":
            raise self._refusal(name, "is of Airflow, which ranks do not have", "Use it in another task")
        if getattr(statement, "level", 0):
            fix = "Import it by its full name"
            raise self._refusal(
                name, "is imported from the package of the DAG file, which ranks do not have", fix
            )
        if line := line_of_patch(self._tree, name):
            fix = "Do that inside the function"
            raise self._refusal(name, f"is changed after it was imported (line {line})", fix)
        if _root_of(top, self._file):
            self.modules.add(top)
        if isinstance(statement, ast.Import):
            return ast.copy_location(ast.Import([alias]), statement)
        return ast.copy_location(ast.ImportFrom(statement.module, [alias], statement.level), statement)

    def _refusal(self, name: str, what: str, fix: str) -> BadInputError:
        return _refusal(self._function, f"it uses `{name}`, which {what}", fix)


def _root_of(module: str, file: Path) -> Path | None:
    """Find the folder from which a module is copied with a DAG file; None if it is installed: ranks have it.

    Airflow also imports modules from the root of the DAGs folder or bundle, after all installed ones.
    """
    if module in sys.stdlib_module_names or module == "manycpu":
        return None
    place = _import_folder(module)
    if place is None:  # Airflow does not find it: only the function itself imports it, in the ranks
        beside = (file.parent / f"{module}.py").is_file() or (file.parent / module).is_dir()
        return file.parent if beside else None
    around = [Path(entry).resolve() for entry in (*sys.path, str(file.parent))]
    contains = any(file.resolve().is_relative_to(entry) and place.is_relative_to(entry) for entry in around)
    return place if contains and not _INSTALL_FOLDERS & {*place.parts} else None


def _import_folder(module: str) -> Path | None:
    """Find the folder that Python imports a module from."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module object that was made by hand
        return None
    if found is None:
        return None
    if found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations))).resolve().parent
    return Path(found.origin).resolve().parent if found.origin and found.has_location else Path("/")


def _refusal(function: Callable[..., Any], what: str, fix: str) -> BadInputError:
    name = getattr(function, "__name__", type(function).__name__)
    return BadInputError(f"{what}, so that it cannot run in the ranks of a training", field=name, fix=fix)
