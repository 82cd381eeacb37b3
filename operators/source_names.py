"""Analyse the statements of a file: which names they bind, use and change."""

from __future__ import annotations

import ast
import symtable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Definition",
    "bindings",
    "globals_of",
    "is_constant",
    "is_future",
    "line_of_change",
    "line_of_patch",
    "literal_of",
    "may_vary",
    "name_of",
    "names_in",
]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_CONSTANT_NODES: Final = (
    *(ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop),
    *(ast.IfExp, ast.JoinedStr, ast.FormattedValue),
)


def bindings(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Map each name that a file binds to the top-level statements that bind it, also in ``if`` or ``try``."""
    bound: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if isinstance(statement, Definition):
            names = [statement.name]
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names = [name_of(alias) for alias in statement.names]
        else:
            table = symtable.symtable(ast.unparse(statement), "<piece>", "exec")
            names = _own_names(table)
        for name in dict.fromkeys(names):
            bound.setdefault(name, []).append(statement)
    return bound


def _own_names(table: symtable.SymbolTable) -> list[str]:
    return [one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()]


def globals_of(pieces: list[ast.stmt]) -> list[str]:
    """List the names that statements use but do not define."""
    top = symtable.symtable("\n".join(map(ast.unparse, pieces)), "<piece>", "exec")
    used = {
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_global() and (symbol.is_referenced() or symbol.is_declared_global())
    }
    return sorted(used.difference(_own_names(top)))


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def line_of_change(tree: ast.Module, name: str) -> int | None:
    """Find the first top-level line that changes the value of a name in place; None if there is none."""
    changed = (node.lineno for one in tree.body for node in _run_by(one) if _changes(node, name))
    return next(changed, None)


def _run_by(statement: ast.stmt) -> Iterator[ast.stmt | ast.expr]:
    """Yield the code that runs with a statement, without the bodies of functions and classes in it."""
    if isinstance(statement, Definition):
        return
    yield statement
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield from _run_by(node)
        elif isinstance(node, ast.expr):
            yield node


def _changes(node: ast.stmt | ast.expr, name: str) -> bool:
    """Whether a node changes the value of a name: an item, an attribute, or by a call of a method."""
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del()):
            return _root(node) == name
        case ast.AugAssign(target=target):
            return _root(target) == name
        case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
            return _root(method) == name
    return _patches(node, name)


def line_of_patch(tree: ast.Module, name: str) -> int | None:
    """Find the first top-level line that sets an attribute of an imported name; None if there is none."""
    patches = (node.lineno for one in tree.body for node in _run_by(one) if _patches(node, name))
    return next(patches, None)


def _patches(node: ast.stmt | ast.expr, name: str) -> bool:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return _root(node) == name
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[first, *_]):
            return _root(first) == name
    return False


def _root(node: ast.expr) -> str | None:
    """Return the name at the start of an expression such as ``name.attribute[item]``, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_future(statement: ast.stmt) -> bool:
    """Whether a statement is ``from __future__ import ...``."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def is_constant(statement: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a statement assigns a value of literals, names and operators to one name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    plain = len(targets) == 1 and isinstance(targets[0], ast.Name) and statement.value is not None
    value: ast.expr | None = statement.value
    return plain and value is not None and all(isinstance(node, _CONSTANT_NODES) for node in ast.walk(value))


def name_of(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def may_vary(value: ast.expr) -> bool:
    """Whether an expression may have another value each time: it has a call, or an item of an attribute."""
    match value:
        case ast.Lambda():
            return False
        case ast.Call() | ast.Await() | ast.NamedExpr() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            return True
        case ast.GeneratorExp() | ast.Subscript(value=ast.Attribute()):
            return True
    return any(may_vary(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))


def literal_of(value: Any) -> ast.expr | None:
    """Return a value as an expression; None if it is not made of numbers, texts, lists and the like."""
    try:
        text = repr(value)
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return ast.parse(text, mode="eval").body if type(same) is type(value) and same == value else None


def names_in(tree: ast.AST) -> set[str]:
    """Return all names that occur in source: of variables, attributes, definitions and arguments."""
    fields = ("id", "attr", "name", "arg")
    found = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return {word for word in found if isinstance(word, str)}
