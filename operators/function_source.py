"""Make a module of a function: its source, and what it uses of its file, so that ranks can run it elsewhere.

Taken along by source, as far as they are used, and what those use in turn: imports, functions, classes, and
constants without calls. The module is the same whatever the function's arguments are. All else is refused.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from manycpu.operators.source_names import (
    Definition,
    bindings,
    globals_of,
    is_constant,
    is_future,
    line_of_change,
    name_of,
)
from manycpu.pipeline.spec.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["module_source"]

_ARGUMENT: Final = "give it as an argument"
_RESULT: Final = f"To have the result of a task, {_ARGUMENT}"
_CALL: Final = """
if __name__ == "__main__":
    from manycpu.pipeline.node.function_task import call

    call({name})
"""
_PRESENT: Final = frozenset(dir(builtins)) | {"__name__"}


def module_source(function: Callable[..., Any], foreign: Collection[str] = ()) -> str:
    """Write the module that runs a function as a program.

    Args:
        function: A plain function, as it was before a decorator of Airflow took it.
        foreign: Names of its parameters that nobody would give: Airflow's context.

    Returns:
        The module's source: it depends on the function and its file alone.

    Raises:
        BadInputError: It would not work elsewhere, or uses something that cannot be taken along.
    """
    _demand_plain(function)
    _demand_parameters(function, foreign)
    tree, node = _parsed(function)
    node.decorator_list = []
    pieces = _Pieces(function, tree, node)
    future = [ast.unparse(one) for one in tree.body if is_future(one)]
    body = [ast.unparse(one) for one in (*pieces.imports, *pieces.others, node)]
    return "\n\n".join([*future, *body]) + "\n\n" + _CALL.format(name=node.name)


def _demand_plain(function: Callable[..., Any]) -> None:
    if not inspect.isfunction(function):
        raise _refusal(function, "it is no function", "Decorate a function with `def`")
    if function.__name__ == "<lambda>":
        raise _refusal(function, "a lambda has no source of its own", "Write it as a function with `def`")
    if hasattr(function, "__wrapped__"):
        fix = "Have @task.manycpu be the last one above `def`, and call the other one inside"
        raise _refusal(function, "another decorator has wrapped it", fix)
    if names := function.__code__.co_freevars:
        fix = f"Move that to the top of the file, or {_ARGUMENT}"
        raise _refusal(function, f"it uses {_listed(names)} of the function around it (a closure)", fix)
    if function.__code__.co_flags & (
        inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    ):
        raise _refusal(function, "it is a generator or async: a call would not run it", "Let it return")


def _demand_parameters(function: Callable[..., Any], foreign: Collection[str]) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        if name in foreign and parameter.default in (parameter.empty, None):
            fix = f'Call it otherwise, and give it as a template, such as day="{{{{ {name} }}}}"'
            raise _refusal(function, f"ranks know nothing of Airflow's context, such as `{name}`", fix)


def _parsed(function: Callable[..., Any]) -> tuple[ast.Module, ast.FunctionDef]:
    """Parse a function's file, and find the function in it."""
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError) as error:
        fix = "Write it into a file: what was made by exec or typed at a prompt has none"
        raise _refusal(function, f"its source cannot be read ({error})", fix) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == function.__code__.co_firstlineno:
                return tree, node
    raise _refusal(function, "its source is not where Python says", "Give it a name of its own")


class _Pieces:
    """What a function uses of its file: ``imports`` and ``others``, each in the order in which they stand."""

    def __init__(self, function: Callable[..., Any], tree: ast.Module, node: ast.FunctionDef) -> None:
        self._function, self._bound, self._tree = function, bindings(tree), tree
        self._folder = Path(function.__code__.co_filename).parent
        self._taken: dict[str, list[ast.stmt]] = {node.name: []}
        self._future = [one for one in tree.body if is_future(one)]
        self._take(node)
        found = {id(one): one for ones in self._taken.values() for one in ones}.values()
        ordered = sorted(found, key=lambda one: (one.lineno, one.col_offset, ast.unparse(one)))
        self.imports = [one for one in ordered if isinstance(one, ast.Import | ast.ImportFrom)]
        self.others = [one for one in ordered if not isinstance(one, ast.Import | ast.ImportFrom)]

    def _take(self, piece: ast.stmt) -> None:
        for one in ast.walk(piece):
            if isinstance(one, ast.Import | ast.ImportFrom):
                for alias in one.names:
                    self._imported(name_of(alias), one)
        for name in globals_of([*self._future, piece]):
            if name not in self._taken and (name in self._bound or name not in _PRESENT):
                self._taken[name] = self._definitions(name)
                for one in self._taken[name]:
                    self._take(one)

    def _definitions(self, name: str) -> list[ast.stmt]:
        """Find the statements that define a name of the file."""
        found = self._bound.get(name, [])
        imported = [one for one in found if isinstance(one, ast.Import | ast.ImportFrom)]
        if imported and len(imported) == len(found):
            return [self._imported(name, one) for one in imported]
        value = self._function.__globals__.get(name)
        if _is_of_airflow(value):
            raise self._refusal(name, "is an object of Airflow, such as a task or a DAG", _RESULT)
        if not found:
            raise self._undefined(name)
        if len(found) > 1 or not isinstance(found[0], Definition | ast.Assign | ast.AnnAssign):
            fix = "Define it once, at the top of the file"
            raise self._refusal(name, "is defined more than once, or on a condition", fix)
        if isinstance(found[0], ast.Assign | ast.AnnAssign) and not is_constant(found[0]):
            fix = f"Make it inside the function, or {_ARGUMENT}"
            raise self._refusal(name, "is made when the DAG file is read, and is no plain constant", fix)
        if line := self._change_of(name, found[0]):
            fix = f"Write it down as it is to be, in one place, or {_ARGUMENT}"
            raise self._refusal(name, f"is changed after its definition ({line})", fix)
        return found

    def _change_of(self, name: str, definition: ast.stmt) -> str | None:
        """Say where a name's value is changed at the file's top; None where it is as it was defined."""
        if (line := line_of_change(self._tree, name)) is not None:
            return f"line {line}"
        if not isinstance(definition, ast.Assign | ast.AnnAssign) or definition.value is None:
            return None
        variables = self._function.__globals__
        code = compile(ast.Expression(definition.value), "<piece>", "eval")
        written = eval(code, dict(variables))  # noqa: S307 - of literals and constants
        return None if written == variables.get(name, written) else "it has another value by now"

    def _imported(self, name: str, statement: ast.Import | ast.ImportFrom) -> ast.stmt:
        """Import a name alone, of all that a statement imports.

        Raises:
            BadInputError: The ranks would not find it.
        """
        alias = next(one for one in statement.names if name_of(one) == name)
        module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else alias.name
        top = module.partition(".")[0]
        if top == "airflow":
            raise self._refusal(name, "is of Airflow, which ranks know nothing of", "Use it in another task")
        if getattr(statement, "level", 0) or _is_beside(self._folder, top):
            fix = "Install it where the ranks run, or write what is used of it into the file"
            raise self._refusal(name, "is imported from beside the DAG file, which ranks do not have", fix)
        if isinstance(statement, ast.Import):
            return ast.copy_location(ast.Import([alias]), statement)
        return ast.copy_location(ast.ImportFrom(statement.module, [alias], statement.level), statement)

    def _undefined(self, name: str) -> BadInputError:
        if name == "__file__":
            return self._refusal(name, "would be another file in the ranks", f"To have a path, {_ARGUMENT}")
        if name in self._function.__globals__:
            return self._refusal(name, "is not defined at the top of the file by its name", "Define it there")
        return self._refusal(name, "is not defined", "Define or import it at the top of the file")

    def _refusal(self, name: str, what: str, fix: str) -> BadInputError:
        return _refusal(self._function, f"it uses `{name}`, which {what}", fix)


def _is_of_airflow(value: object) -> bool:
    return bool(re.match(r"(airflow|manycpu\.operators)\b", type(value).__module__))


def _is_beside(folder: Path, module: str) -> bool:
    """Whether a module comes from a folder: one without ``__init__.py`` gives way to what is installed."""
    if (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file():
        return True
    return (folder / module).is_dir() and not _is_installed(folder, module)


def _is_installed(folder: Path, module: str) -> bool:
    elsewhere = [place for place in sys.path if Path(place).resolve() != folder.resolve()]
    found = importlib.machinery.PathFinder.find_spec(module, elsewhere)
    return module in sys.stdlib_module_names or (found is not None and found.origin is not None)


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _refusal(function: Callable[..., Any], what: str, fix: str) -> BadInputError:
    name = getattr(function, "__name__", type(function).__name__)
    return BadInputError(f"{what}, so that it cannot run in the ranks of a training", field=name, fix=fix)
