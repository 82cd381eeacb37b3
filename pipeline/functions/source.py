"""Serialise a function as source: a module with the statements of its file that the function uses.

The ranks do not have the function's file. The module has the imports, functions, classes and constants
without calls that the function uses, and those that these use in turn. Modules of the DAGs folder are copied
as files. Arguments are not part of the module. A function that uses anything else is refused, and so is one
that uses a value which was changed after its definition.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from manycpu.pipeline.functions.difference import Comparison
from manycpu.pipeline.functions.program import (
    globals_of,
    is_generator_or_async,
    item_name,
    operands,
    write_program,
)
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
# Modules that ranks have, whose names libraries look up when they read annotations.
_ANNOTATION_LIBRARIES: Final = _FIELD_LIBRARIES | sys.stdlib_module_names | {"typing_extensions"}
_TYPE_ALIAS: Final = getattr(ast, "TypeAlias", ast.ClassDef)  # since Python 3.12
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | _TYPE_ALIAS
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
        foreign: Names of parameters that ranks have no value for: the names in Airflow's context.

    Raises:
        BadInputError: The function cannot run elsewhere, uses something that cannot be copied, or was changed
            after its definition.
    """
    for reason, fix in _reasons_against(function, foreign):
        raise _refusal(function, reason, fix)  # at the first reason, if there is one
    # Ranks may need what only annotations name. If that would be refused, write the module without it.
    with suppress(BadInputError):
        return _write_module(function, with_annotated=True)
    return _write_module(function, with_annotated=False)


def _write_module(function: Callable[..., Any], *, with_annotated: bool) -> FunctionModule:
    """Write a function's module; ``with_annotated``: add definitions of its file that only annotations name.

    Raises:
        BadInputError: The source cannot be read, or uses something that cannot be copied or was changed.
    """
    tree, node = _parse_file_of(function)
    node.decorator_list = []  # @task.manycpu above all: ranks have no Airflow
    needed = _UsedStatements(function, tree, node, with_annotated=with_annotated)
    # One statement may define several names: take it once.
    statements: list[ast.stmt] = []
    for definitions in needed.by_name.values():
        statements += [statement for statement in definitions if statement not in statements]

    def imports_first(statement: ast.stmt) -> tuple[object, ...]:
        """Return a sort key: imports before other statements, both in the order of the file."""
        is_import = isinstance(statement, _Import)
        # Its text comes last: `import a, b` becomes two statements at one place.
        return not is_import, statement.lineno, statement.col_offset, ast.unparse(statement)

    body = [*needed.future_imports, *sorted(statements, key=imports_first), node]
    _check_unchanged(function, needed.by_name, body)
    source = "\n\n".join(map(ast.unparse, body)) + "\n\n" + _CALL.format(name=node.name)
    return FunctionModule(source, frozenset(needed.modules), _copied_folders(function))


def _copied_folders(function: Callable[..., Any]) -> list[Path]:
    """List the folders whose modules are copied beside the program; ranks have all other modules installed.

    These are the folder of the function's file, the folders around it that are in ``sys.path`` (Airflow puts
    the root of the DAGs folder or bundle there), and other entries of ``sys.path`` below one of these.
    """
    own_folder = Path(function.__code__.co_filename).resolve().parent
    entries = [own_folder, *(Path(entry).resolve() for entry in sys.path)]
    roots = [entry for entry in entries if own_folder.is_relative_to(entry)]
    return [entry for entry in entries if any(entry.is_relative_to(root) for root in roots)]


def _check_unchanged(
    function: Callable[..., Any], definitions: dict[str, list[ast.stmt]], body: list[ast.stmt]
) -> None:
    """Refuse a function if ranks, which execute the source again, would use other values than this process.

    Executes the module's body here, and compares the results with the present values of the names.

    Args:
        function: The function.
        definitions: Name that the function uses -> the statements that define it.
        body: All statements of the module.

    Raises:
        BadInputError: A value differs, or the body cannot be executed twice.
    """
    module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    executed_again = _execute_again(function, module)
    # Comparison ignores private attributes whose name is not in the source: they belong to libraries.
    fields = ("id", "attr", "name", "arg")
    names_in_source = {getattr(node, field, None) for node in ast.walk(module) for field in fields}
    present_values: dict[str, Any] = {}
    for name, statements in definitions.items():
        # Skipped are the function itself, which alone has no statements here and is added below; imports, as
        # each rank imports the module itself; and names that have no value now.
        if statements and not isinstance(statements[0], _Import) and name in function.__globals__:
            present_values[name] = function.__globals__[name]
    present_values[function.__name__] = function
    for name, value in present_values.items():
        difference = Comparison(names_in_source).difference(name, value, executed_again[name])
        if difference is not None:
            subject = "it" if value is function else f"it uses `{name}`, which"
            raise _refusal(function, f"{subject} is changed after its definition ({difference})", _ONCE)


def _execute_again(function: Callable[..., Any], module: ast.Module) -> dict[str, Any]:
    """Execute a module made from a function's file, as if it were that file's module; returns its globals.

    Raises:
        BadInputError: The execution fails.
    """
    name, file = function.__module__, function.__code__.co_filename
    again = ModuleType(name)
    again.__file__ = file
    # Libraries look up the names of annotations in the module: they must find only what ranks will have.
    present = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = again
    try:
        # With the file's name and lines: code of other lines compares as different. dont_inherit: without the
        # `from __future__ import annotations` of source.py itself.
        exec(compile(module, file, "exec", dont_inherit=True), vars(again))  # noqa: S102 - the DAG file's own code
    except Exception as error:
        reason = f"what it uses of its file cannot be defined a second time ({type(error).__name__}: {error})"
        raise _refusal(function, reason, "Define that inside the function") from error
    finally:
        sys.modules.pop(name, None)
        sys.modules |= present
    return vars(again)


def _reasons_against(function: Callable[..., Any], foreign: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield every reason why a function cannot be a program, each with its fix."""
    # The caller refuses the function at the first reason: later checks rely on the earlier ones.
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
    if is_generator_or_async(function):
        yield "it is a generator or async: a call would not run it", "Write a plain function"
    for name, parameter in inspect.signature(function).parameters.items():
        if name in foreign and parameter.default in (parameter.empty, None):
            fix = f'Rename the parameter, and pass a template to it, such as day="{{{{ {name} }}}}"'
            yield f"ranks have no values of Airflow's context, such as `{name}`", fix


def _parse_file_of(function: Callable[..., Any]) -> tuple[ast.Module, ast.FunctionDef]:
    """Parse the file of a function; return the file's tree, and the function's definition in it.

    Raises:
        BadInputError: The source cannot be read, or the definition is not at the line that Python names.
    """
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError) as error:
        fix = "Write it into a file: code from exec or from a prompt has no source"
        raise _refusal(function, f"its source cannot be read ({error})", fix) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            # Python counts the lines of a function from its first decorator.
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first_line == function.__code__.co_firstlineno:
                return tree, node
    raise _refusal(function, "its source is not where Python says", "Give it a unique name")


class _UsedStatements:
    """Finds the top-level statements of a file that a function in it uses, and those that these use in turn.

    Args:
        function: The function.
        tree: The file.
        node: The definition of the function in the file.
        with_annotated: Whether to add, where possible, definitions that only annotations name; imports that
            only annotations name are always added where possible.

    Raises:
        BadInputError: One of the statements cannot be copied to the ranks.
    """

    def __init__(
        self, function: Callable[..., Any], tree: ast.Module, node: ast.FunctionDef, *, with_annotated: bool
    ) -> None:
        self._function, self._tree = function, tree
        self.future_imports = [
            statement
            for statement in tree.body
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        ]
        self._defined_in_file: dict[str, list[ast.stmt]] = {}
        """Global name -> the top-level statements that assign it."""
        for statement in tree.body:
            # The compiled statement has every name that it assigns, however it is written.
            for name in operands(_compile(statement), "STORE_NAME", "STORE_GLOBAL"):
                self._defined_in_file.setdefault(name, []).append(statement)
        self.modules: set[str] = set()
        """Top-level names of the modules that the statements import."""
        self.by_name: dict[str, list[ast.stmt]] = {node.name: []}
        """Name that is used -> the statements that define it; the function's own definition is not listed."""
        self._add_used_statements(node, function)
        self._add_annotated(node, with_annotated=with_annotated)

    def _add_used_statements(self, statement: ast.stmt, value: Any) -> None:
        """Add the statements that a statement uses, and those that they use in turn.

        Args:
            statement: A definition, or an import.
            value: What the name that it defines stands for at present.
        """
        self._freeze_calls(statement, value)  # first: what only a frozen call used is not needed
        # Imports in a function stay as written: check them, and note their modules.
        for node in ast.walk(statement):
            if isinstance(node, _Import):
                for alias in node.names:
                    self._single_import(_bound_name(alias), node)
        # With the file's `from __future__`: it may keep annotations from being executed.
        for name in sorted(globals_of(_compile(*self.future_imports, statement))):
            if not self._is_builtin(name):
                self._add(name)

    def _add_annotated(self, node: ast.FunctionDef, *, with_annotated: bool) -> None:
        """Add what only annotations name, such as ``ClassVar`` or a model: libraries look up these names.

        Args:
            node: The definition of the function.
            with_annotated: True: add definitions and imports; False: add only imports.
        """
        tried: set[str] = set()
        while True:  # each round may add statements with annotations of their own
            statements = [node, *itertools.chain(*self.by_name.values())]
            named = set().union(*map(_names_in_read_annotations, statements)) & self._defined_in_file.keys()
            if named <= tried:
                return
            for name in sorted(named - tried):
                is_imported = all(isinstance(one, _Import) for one in self._defined_in_file[name])
                if is_imported or with_annotated:
                    self._add_if_possible(name)
            tried |= named

    def _add_if_possible(self, name: str) -> None:
        """Add the statements that define a name, unless ranks may lack a package or they cannot be copied."""
        by_name_before, modules_before = self.by_name.copy(), self.modules.copy()
        with suppress(BadInputError):
            self._add(name)
            # Ranks may lack a package that only annotations need.
            if self.modules <= modules_before | _ANNOTATION_LIBRARIES:
                return
        self.by_name, self.modules = by_name_before, modules_before

    def _is_builtin(self, name: str) -> bool:
        """Whether a name is Python's own, such as ``len``; False: the file or a star import defines it."""
        if name not in _BUILTIN_NAMES or name in self._defined_in_file:
            return False
        if name.startswith("__"):  # each module has its own `__name__`: that it differs means nothing
            return True
        own = getattr(builtins, name, None)
        return self._function.__globals__.get(name, own) is own  # else a star import has replaced it

    def _add(self, name: str) -> None:
        """Add the statements that define a name, and those that they use in turn."""
        if name in self.by_name:
            return
        self.by_name[name] = self._definitions(name)  # before what they use, which may use this name
        value = self._function.__globals__.get(name)  # has what calls in its definition returned
        for definition in self.by_name[name]:
            self._add_used_statements(definition, value)

    def _freeze_calls(self, statement: ast.stmt, value: Any) -> None:
        """Replace calls in defaults and class attributes by their results, so that ranks do not repeat them.

        Args:
            statement: Changed in place if it defines a function or a class.
            value: The function or class that it has defined.

        Raises:
            BadInputError: A default has no literal, or a class has a statement that defines nothing.
        """
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            self._freeze_defaults(statement, value)
        if not isinstance(statement, ast.ClassDef):
            return
        members = dict(vars(value)) if isinstance(value, type) else {}
        prefix = f"_{statement.name.lstrip('_')}"  # Python stores `__seed` as `_Model__seed`
        private = [name for name in members if name.startswith(f"{prefix}__")]
        members |= {name.removeprefix(prefix): members[name] for name in private}
        for member in statement.body:
            match member:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._freeze_calls(member, members.get(member.name))
                case (
                    ast.Assign(targets=[ast.Name(id=name), *_], value=ast.expr() as given)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as given)
                ) if name in members and _may_change_each_time(given):
                    # A description such as `field()` stays: its library has replaced the value in the class.
                    if not self._is_field_description(given):
                        # If there is no literal, the call stays, and `_check_unchanged` compares its results.
                        member.value = _as_literal(members[name], given) or given
                # Any other assignment, `pass`, or a docstring: it stays as it is.
                case ast.Assign() | ast.AnnAssign() | ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    what = f"has a statement in it that defines nothing (line {member.lineno})"
                    raise self._refusal(statement.name, what, "Assign each of its attributes once")

    def _freeze_defaults(self, definition: ast.FunctionDef | ast.AsyncFunctionDef, value: Any) -> None:
        """Replace calls in a function's defaults by their results; refuse a result that has no literal.

        ``value`` is the function that the definition has made.
        """
        value = getattr(value, "__func__", value)  # of a class method
        function = inspect.unwrap(value) if callable(value) else None  # without decorators that wrap it
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}

        def frozen(argument: ast.arg, default: Any) -> Any:
            """Return the default as it is written, or its present value as a literal."""
            # None: a keyword-only argument without a default.
            if default is None or not _may_change_each_time(default):
                return default
            if argument.arg in parameters:
                literal = _as_literal(parameters[argument.arg].default, default)
                if literal is not None:
                    return literal
            what = f"has a default for `{argument.arg}` that is made when the DAG file is read"
            fix = "Use None as the default, and make the value inside the function"
            raise self._refusal(definition.name, what, fix)

        arguments = definition.args
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = positional[len(positional) - len(arguments.defaults) :]  # the last ones
        arguments.defaults = [*map(frozen, with_default, arguments.defaults)]
        arguments.kw_defaults = [*map(frozen, arguments.kwonlyargs, arguments.kw_defaults)]

    def _is_field_description(self, value: ast.expr) -> bool:
        """Whether an expression is, or calls, a name of a library for data classes, such as ``field()``."""
        callee = value.func if isinstance(value, ast.Call) else value
        try:
            code = compile(ast.Expression(callee), "<callee>", "eval")
            called = eval(code, dict(self._function.__globals__))  # noqa: S307 - a name that the file has called itself
        except Exception:  # noqa: BLE001 - the name is no longer defined
            return False
        return str(getattr(called, "__module__", "")).partition(".")[0] in _FIELD_LIBRARIES

    def _definitions(self, name: str) -> list[ast.stmt]:
        """Return the statements that define a global name of the file.

        Raises:
            BadInputError: There is none, or what the name stands for cannot be copied as source.
        """
        statements = self._defined_in_file.get(name, [])
        imports = [statement for statement in statements if isinstance(statement, _Import)]
        if imports and len(imports) == len(statements):  # only imports define it
            return [self._single_import(name, statement) for statement in imports]
        for what, fix in self._reasons_not_to_copy(name, statements):
            raise self._refusal(name, what, fix)  # at the first reason, if there is one
        return statements

    def _reasons_not_to_copy(self, name: str, statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
        """Yield every reason why a name cannot be copied with the statements that define it, with its fix."""
        # The caller refuses the name at the first reason: later checks rely on the earlier ones.
        if re.match(r"(airflow|manycpu\.operators)\b", type(self._function.__globals__.get(name)).__module__):
            fix = f"To have the result of a task, {_ARGUMENT}"
            yield "is an object of Airflow, such as a task or a DAG", fix
        if not statements and name == "__file__":
            yield "would be another file in the ranks", f"To have a path, {_ARGUMENT}"
        if name == "__doc__":
            yield "is the text of the DAG file, which the ranks do not have", f"To have a text, {_ARGUMENT}"
        if not statements and name in self._function.__globals__:  # such as by a star import
            yield "is not defined at the top of the file by its name", "Define it there"
        if not statements:
            yield "is not defined", "Define or import it at the top of the file"
        if len(statements) > 1 or not isinstance(statements[0], _Definition | _Assignment):
            yield "is defined more than once, or on a condition", "Define it once, at the top of the file"
        if isinstance(statements[0], _Assignment) and not _is_constant(statements[0]):
            fix = f"Make it inside the function, or {_ARGUMENT}"
            yield "is made when the DAG file is read, and is no plain constant", fix
        if line := _first_line_that_changes(self._tree, name):
            yield f"is changed after its definition (line {line})", _ONCE

    def _single_import(self, name: str, statement: ast.Import | ast.ImportFrom) -> ast.stmt:
        """Return an import of only this name of a statement, and add its module to ``modules``.

        Raises:
            BadInputError: Ranks cannot import it.
        """
        aliases = [alias for alias in statement.names if _bound_name(alias) == name]
        # The module of `from . import name` has no name.
        module = statement.module if isinstance(statement, ast.ImportFrom) else aliases[0].name
        top = (module or "").partition(".")[0]
        if top == "airflow":
            raise self._refusal(name, "is of Airflow, which ranks do not have", "Use it in another task")
        if getattr(statement, "level", 0):  # a relative import
            what = "is imported from the package of the DAG file, which ranks do not have"
            raise self._refusal(name, what, "Import it by its full name")
        if line := _first_line_that_changes(self._tree, name, imported=True):
            what = f"is changed after it was imported (line {line})"
            raise self._refusal(name, what, "Do that inside the function")
        self.modules.add(top)
        if isinstance(statement, ast.Import):
            return ast.copy_location(ast.Import(aliases), statement)
        return ast.copy_location(ast.ImportFrom(statement.module, aliases, statement.level), statement)

    def _refusal(self, name: str, what: str, fix: str) -> BadInputError:
        return _refusal(self._function, f"it uses `{name}`, which {what}", fix)


def _refusal(function: Callable[..., Any], reason: str, fix: str) -> BadInputError:
    message = f"{reason}, so that it cannot run in the ranks of a training"
    return BadInputError(message, field=item_name(function), fix=fix)


def _compile(*statements: ast.stmt) -> CodeType:
    return compile(ast.Module([*statements], type_ignores=[]), "<statements>", "exec", dont_inherit=True)


def _bound_name(alias: ast.alias) -> str:
    """Return the name that an import assigns: ``os`` for ``os.path``, or what follows ``as``."""
    return alias.asname or alias.name.partition(".")[0]


def _names_in_read_annotations(statement: ast.stmt) -> set[str]:
    """Return the names in annotations that libraries such as dataclasses read, also in annotations as text.

    Libraries read the annotations of a class's attributes, and of functions with a decorator.
    """
    annotations: list[ast.expr | None] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.ClassDef):
            annotations += [member.annotation for member in node.body if isinstance(member, ast.AnnAssign)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.decorator_list:
            arguments = [one for one in ast.walk(node.args) if isinstance(one, ast.arg)]
            annotations += [node.returns, *(argument.annotation for argument in arguments)]
    return {name for annotation in annotations if annotation for name in _names_in_annotation(annotation)}


def _names_in_annotation(node: ast.AST) -> Iterator[str]:
    """Yield the names in an annotation, also those in its texts, but for the texts of ``Literal``."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Constant(value=str(text)):
            with suppress(SyntaxError, ValueError):
                yield from _names_in_annotation(ast.parse(text, mode="eval"))
        # The names of `Literal` itself, and of what stands in it; its texts are values, and no annotations.
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal")):
            yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        case _:
            for part in ast.iter_child_nodes(node):
                yield from _names_in_annotation(part)


def _is_constant(statement: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a statement assigns a value of literals, names and operators to one name."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
            return value is not None and all(isinstance(node, _CONSTANT_NODES) for node in ast.walk(value))
    return False


def _may_change_each_time(value: ast.expr) -> bool:
    """Whether an expression may have another value each time that it is executed.

    It may if it contains a call, a comprehension, or an item of an attribute, as ``os.environ["HOME"]``.
    """
    if isinstance(value, ast.Lambda):  # its body is not executed here
        return False
    has_item = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute)
    parts = (part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
    return has_item or isinstance(value, _VARYING_NODES) or any(map(_may_change_each_time, parts))


def _as_literal(value: Any, written: ast.expr) -> ast.expr | None:
    """Write a value as a literal at the place of an expression; None if Python has no literal for it.

    >>> ast.unparse(_as_literal([1, {"b", "a"}], ast.Constant(0)))
    "[1, {'a', 'b'}]"
    """
    try:
        text = repr(value)
        read_back = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if type(read_back) is not type(value) or read_back != value:  # the repr is that of another value
        return None
    literal = ast.parse(text, mode="eval").body
    for node in ast.walk(literal):
        if isinstance(node, ast.Set):  # each process has its own order of sets: the source would differ
            node.elts.sort(key=ast.unparse)
    return ast.copy_location(literal, written)


def _first_line_that_changes(tree: ast.Module, name: str, *, imported: bool = False) -> int | None:
    """Return the number of the first top-level line that changes a value in place; None if there is none.

    Args:
        tree: The file.
        name: The name of the value.
        imported: Whether the name is imported: then only assignments to its attributes count.
    """
    for statement in tree.body:
        for node in _executed_with(statement):
            if _changes(node, name, imported=imported):
                return node.lineno
    return None


def _changes(node: ast.stmt | ast.expr, name: str, *, imported: bool) -> bool:
    """Whether a node assigns to a part of a value, or calls a method of it and ignores the result.

    Of an imported module or object, only assignments to its attributes count.
    """
    changed: ast.expr | None = None
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            changed = node
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[first, *_]):
            changed = first
        case _ if imported:  # a call such as logging.basicConfig() does not change the import itself
            pass
        case ast.Subscript(ctx=ast.Store() | ast.Del()):
            changed = node
        case ast.AugAssign(target=target):  # such as values += [1]
            changed = target
        case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):  # such as values.append(1)
            changed = method
    return changed is not None and _base_name(changed) == name


def _executed_with(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Yield a statement, the statements inside it that Python executes with it, and their expressions.

    The bodies of functions and classes are left out, and so are the parts of an expression. But of a tuple or
    list, such as the target ``a.x, b``, each part is yielded too.
    """
    if isinstance(node, _Definition):
        return
    if isinstance(node, ast.stmt | ast.expr):
        yield node
    if not isinstance(node, ast.expr) or isinstance(node, ast.Tuple | ast.List | ast.Starred):
        for child in ast.iter_child_nodes(node):
            yield from _executed_with(child)


def _base_name(node: ast.expr) -> str | None:
    """Return the name at the start of an expression such as ``name.attribute[item]``, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
