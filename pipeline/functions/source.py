"""Serialise a function as source: a module of what it uses of its file, for ranks that have no such file.

The module has the imports, functions, classes and constants without calls that the function uses, and what
those use in turn. Modules of the DAGs folder are copied as files. Arguments are not part of the module.
Anything else is refused, and so is what was changed after its definition.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from manycpu.pipeline.functions.difference import Comparison
from manycpu.pipeline.functions.program import does_nothing, globals_of, item_name, operands, write_program
from manycpu.pipeline.spec.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import CodeType

_ARGUMENT: Final = "give it as an argument"
_ONCE: Final = f"Define it once, with its final value, or {_ARGUMENT}"
_CALL: Final = """
if __name__ == "__main__":
    from manycpu.pipeline.node.function_task import call

    call({name})
"""
_BUILTIN_NAMES: Final = frozenset(dir(builtins)) | {"__annotations__", "__name__"}
# Libraries whose calls describe fields of classes.
_FIELD_LIBRARIES: Final = {"attr", "attrs", "dataclasses", "pydantic"}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Import = ast.Import | ast.ImportFrom
_Assignment = ast.Assign | ast.AnnAssign
_CONSTANT_NODES: Final = (
    *(ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop),
    *(ast.IfExp, ast.JoinedStr, ast.FormattedValue),
)
_VARYING_NODES: Final = (
    *(ast.Call, ast.Await, ast.NamedExpr),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


class FunctionModule(NamedTuple):
    """A function as a program."""

    source: str
    """The module's text, which depends only on the function and its file."""
    modules: frozenset[str]
    """Top-level names of the modules that it imports."""
    roots: list[Path]
    """Folders from which modules are copied."""

    def write(self, program: Path) -> None:
        """Write the module, and copy the modules that it imports beside it."""
        write_program(program, self.source, self.modules, self.roots)


def function_module(function: Callable[..., Any], foreign: Collection[str] = ()) -> FunctionModule:
    """Write the module that runs a function as a program.

    Args:
        function: A plain function, without the decorators of Airflow.
        foreign: Names of parameters that ranks have no value for: those of Airflow's context.

    Raises:
        BadInputError: The function cannot run elsewhere, uses something that cannot be copied, or was changed
            after its definition.
    """
    for what, fix in _objections(function, foreign):
        raise _refusal(function, what, fix)
    tree, node = _parsed(function)
    node.decorator_list = []
    pieces = _Pieces(function, tree, node)
    found = {id(one): one for ones in pieces.used.values() for one in ones}.values()
    # Imports first, each kind as in the file.
    ordered = sorted(
        found, key=lambda one: (not isinstance(one, _Import), one.lineno, one.col_offset, ast.unparse(one))
    )
    body = [*pieces.future, *ordered, node]
    _check_unchanged(function, pieces.used, body)
    source = "\n\n".join(map(ast.unparse, body)) + "\n\n" + _CALL.format(name=node.name)
    return FunctionModule(source, frozenset(pieces.modules), _roots(function))


def _roots(function: Callable[..., Any]) -> list[Path]:
    """List the folders whose modules are copied: the file's, and entries of ``sys.path`` in or around it.

    Airflow also imports modules from the root of the DAGs folder or bundle, after all installed ones.
    """
    folder = Path(function.__code__.co_filename).resolve().parent
    entries = [folder, *(Path(entry).resolve() for entry in sys.path)]
    around = [entry for entry in entries if folder.is_relative_to(entry)]
    return [entry for entry in entries if any(map(entry.is_relative_to, around))]


def _check_unchanged(
    function: Callable[..., Any], used: dict[str, list[ast.stmt]], body: list[ast.stmt]
) -> None:
    """Execute the definitions a second time, and compare the results with what the function uses.

    Raises:
        BadInputError: They differ, or cannot be executed twice.
    """
    module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    again: dict[str, Any] = {"__name__": function.__module__}
    try:
        # With the file's name and lines: code of other lines compares as different.
        exec(compile(module, function.__code__.co_filename, "exec", dont_inherit=True), again)  # noqa: S102 - the DAG file's own code
    except Exception as error:
        what = f"what it uses of its file cannot be defined a second time ({type(error).__name__}: {error})"
        raise _refusal(function, what, "Define that inside the function") from error
    # Private attributes of other names belong to libraries.
    fields = ("id", "attr", "name", "arg")
    names = {getattr(node, field, None) for node in ast.walk(module) for field in fields}
    now = {
        name: function.__globals__[name]
        for name, pieces in used.items()
        if pieces and not isinstance(pieces[0], _Import) and name in function.__globals__
    }
    for name, value in (now | {function.__name__: function}).items():
        if found := Comparison(names).difference(name, value, again[name]):
            subject = "it" if value is function else f"it uses `{name}`, which"
            raise _refusal(function, f"{subject} is changed after its definition ({found})", _ONCE)


def _objections(function: Callable[..., Any], foreign: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield why a function cannot be a program, and what to do."""
    if not inspect.isfunction(function):
        yield "it is no function", "Decorate a function with `def`"
    if function.__name__ == "<lambda>":
        yield "a lambda has no source of its own", "Write it as a function with `def`"
    if hasattr(function, "__wrapped__"):
        fix = "Put @task.manycpu directly above `def`, and apply the other decorator inside the function"
        yield "another decorator has wrapped it", fix
    if names := function.__code__.co_freevars:
        listed = ", ".join(f"`{name}`" for name in names)
        fix = f"Move that to the top of the file, or {_ARGUMENT}"
        yield f"it uses {listed} of the function around it (a closure)", fix
    if does_nothing(function):
        yield "it is a generator or async: a call would not run it", "Write a plain function"
    for name, parameter in inspect.signature(function).parameters.items():
        if name in foreign and parameter.default in (parameter.empty, None):
            fix = f'Rename the parameter, and pass a template to it, such as day="{{{{ {name} }}}}"'
            yield f"ranks have no values of Airflow's context, such as `{name}`", fix


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
    """The statements of its file that a function uses, by the names for which they are used."""

    def __init__(self, function: Callable[..., Any], tree: ast.Module, node: ast.FunctionDef) -> None:
        self._function, self._tree = function, tree
        self.future = [
            one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"
        ]
        self._bound: dict[str, list[ast.stmt]] = {}
        for statement in tree.body:
            for name in operands(_compiled(statement), "STORE_NAME", "STORE_GLOBAL"):
                self._bound.setdefault(name, []).append(statement)
        self.modules: set[str] = set()
        self.used: dict[str, list[ast.stmt]] = {node.name: []}
        self._add_used_by(node, function)

    def _add_used_by(self, piece: ast.stmt, value: Any = None) -> None:
        """Add the statements that a statement uses, and those that they use in turn."""
        self._write_values(piece, value)
        for one in ast.walk(piece):
            if isinstance(one, _Import):
                for alias in one.names:
                    self._imported(_name_of(alias), one)
        for name in sorted(globals_of(_compiled(*self.future, piece))):
            if name not in self.used and (name in self._bound or name not in _BUILTIN_NAMES):
                self.used[name] = self._definitions(name)
                for one in self.used[name]:
                    self._add_used_by(one, self._function.__globals__.get(name))

    def _write_values(self, piece: ast.stmt, value: Any) -> None:
        """Replace calls in a definition by the values that they gave; ranks would evaluate them again."""
        if isinstance(piece, ast.FunctionDef | ast.AsyncFunctionDef):
            self._write_default_values(piece, value)
        if not isinstance(piece, ast.ClassDef):
            return
        members = vars(value) if isinstance(value, type) else {}
        for one in piece.body:
            match one:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._write_values(one, members.get(one.name))
                case (
                    ast.Assign(targets=[ast.Name(id=name), *_], value=ast.expr() as given)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as given)
                ) if name in members and _may_vary(given):
                    if not self._describes_a_field(given):
                        one.value = _literal_of(members[name], given) or given
                case ast.Assign() | ast.AnnAssign() | ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    what = f"has a statement in it that defines nothing (line {one.lineno})"
                    raise self._refusal(piece.name, what, "Assign each of its attributes once")

    def _write_default_values(self, piece: ast.FunctionDef | ast.AsyncFunctionDef, value: Any) -> None:
        function = inspect.unwrap(value) if callable(value := getattr(value, "__func__", value)) else None
        known = inspect.signature(function).parameters if inspect.isfunction(function) else {}

        def with_value(argument: ast.arg, default: Any) -> Any:
            if default is None or not _may_vary(default):
                return default
            if argument.arg in known and (written := _literal_of(known[argument.arg].default, default)):
                return written
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
        imported = [one for one in found if isinstance(one, _Import)]
        if imported and len(imported) == len(found):
            return [self._imported(name, one) for one in imported]
        for what, fix in self._obstacles(name, found):
            raise self._refusal(name, what, fix)
        return found

    def _obstacles(self, name: str, found: list[ast.stmt]) -> Iterator[tuple[str, str]]:
        """Yield why a name cannot be copied with the statements that bind it, and what to do."""
        if re.match(r"(airflow|manycpu\.operators)\b", type(self._function.__globals__.get(name)).__module__):
            fix = f"To have the result of a task, {_ARGUMENT}"
            yield "is an object of Airflow, such as a task or a DAG", fix
        if not found and name == "__file__":
            yield "would be another file in the ranks", f"To have a path, {_ARGUMENT}"
        if name == "__doc__":
            yield "is the text of the DAG file, which the ranks do not have", f"To have a text, {_ARGUMENT}"
        if not found and name in self._function.__globals__:
            yield "is not defined at the top of the file by its name", "Define it there"
        if not found:
            yield "is not defined", "Define or import it at the top of the file"
        if len(found) > 1 or not isinstance(found[0], _Definition | _Assignment):
            yield "is defined more than once, or on a condition", "Define it once, at the top of the file"
        if isinstance(found[0], _Assignment) and not _is_constant(found[0]):
            fix = f"Make it inside the function, or {_ARGUMENT}"
            yield "is made when the DAG file is read, and is no plain constant", fix
        if line := _line_of_change(self._tree, name):
            yield f"is changed after its definition (line {line})", _ONCE

    def _imported(self, name: str, statement: ast.Import | ast.ImportFrom) -> ast.stmt:
        """Return an import of one name only, of all that a statement imports.

        Raises:
            BadInputError: Ranks cannot import it.
        """
        aliases = [one for one in statement.names if _name_of(one) == name]
        module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else aliases[0].name
        top = module.partition(".")[0]
        if top == "airflow":
            raise self._refusal(name, "is of Airflow, which ranks do not have", "Use it in another task")
        if getattr(statement, "level", 0):
            what = "is imported from the package of the DAG file, which ranks do not have"
            raise self._refusal(name, what, "Import it by its full name")
        if line := _line_of_change(self._tree, name, imported=True):
            what = f"is changed after it was imported (line {line})"
            raise self._refusal(name, what, "Do that inside the function")
        self.modules.add(top)
        if isinstance(statement, ast.Import):
            return ast.copy_location(ast.Import(aliases), statement)
        return ast.copy_location(ast.ImportFrom(statement.module, aliases, statement.level), statement)

    def _refusal(self, name: str, what: str, fix: str) -> BadInputError:
        return _refusal(self._function, f"it uses `{name}`, which {what}", fix)


def _refusal(function: Callable[..., Any], what: str, fix: str) -> BadInputError:
    message = f"{what}, so that it cannot run in the ranks of a training"
    return BadInputError(message, field=item_name(function), fix=fix)


def _compiled(*pieces: ast.stmt) -> CodeType:
    return compile(ast.Module([*pieces], type_ignores=[]), "<piece>", "exec", dont_inherit=True)


def _name_of(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def _is_constant(statement: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a statement assigns a value of literals, names and operators to one name."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
            return value is not None and all(isinstance(node, _CONSTANT_NODES) for node in ast.walk(value))
    return False


def _may_vary(value: ast.expr) -> bool:
    """Whether an expression may have another value each time: it has a call, or an item of an attribute."""
    if isinstance(value, ast.Lambda):
        return False
    has_item = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute)
    parts = (part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
    return has_item or isinstance(value, _VARYING_NODES) or any(map(_may_vary, parts))


def _literal_of(value: Any, written: ast.expr) -> ast.expr | None:
    """Write a value in place of an expression; None if it is not of numbers, texts, lists and the like."""
    try:
        text = repr(value)
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if type(same) is not type(value) or same != value:
        return None
    return ast.copy_location(ast.parse(text, mode="eval").body, written)


def _line_of_change(tree: ast.Module, name: str, *, imported: bool = False) -> int | None:
    """Find the first top-level line that changes the value of a name in place; None if there is none.

    Of an imported name only attributes that are set count.
    """

    def changes(node: ast.stmt | ast.expr) -> bool:
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                return _root(node) == name
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[first, *_]):
                return _root(first) == name
            case ast.Subscript(ctx=ast.Store() | ast.Del()) if not imported:
                return _root(node) == name
            case ast.AugAssign(target=target) if not imported:
                return _root(target) == name
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)) if not imported:
                return _root(method) == name
        return False

    return next((node.lineno for one in tree.body for node in _run_by(one) if changes(node)), None)


def _run_by(statement: ast.stmt) -> Iterator[ast.stmt | ast.expr]:
    """Yield the code that runs with a statement, without the bodies of functions and classes in it."""
    if isinstance(statement, _Definition):
        return
    yield statement
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield from _run_by(node)
        elif isinstance(node, ast.expr):
            yield node


def _root(node: ast.expr) -> str | None:
    """Return the name at the start of an expression such as ``name.attribute[item]``, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
