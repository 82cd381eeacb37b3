"""What a program's source says about processes that it starts itself, and what people do wrong with them.

The source is parsed and never run. A warning needs what is wrong to stand there: a start method that is
chosen at run time, or processes that another module starts, are not judged.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from manycpu.pipeline.spec.errors import Finding

__all__ = ["findings"]

_STARTERS: Final = {
    "multiprocessing.Pool",
    "multiprocessing.Process",
    "multiprocessing.spawn",  # of torch
    "multiprocessing.start_processes",
    "concurrent.futures.ProcessPoolExecutor",
}
_ALWAYS_SPAWN: Final = "multiprocessing.spawn"
_CHOOSERS: Final = {"multiprocessing.get_context", "multiprocessing.set_start_method"}
_IMPORT_AGAIN: Final = {"spawn", "forkserver"}  # the methods whose processes import the program's file anew
_MAKE_THREADS: Final = {
    "concurrent.futures.ThreadPoolExecutor",
    "threading.Thread",
    "torch.distributed.init_process_group",
}
_SET_THREADS: Final = "torch.set_num_threads"

_Functions = ast.FunctionDef | ast.AsyncFunctionDef


def findings(source: str, name: str, subprocesses: int, threads: int | None) -> Iterator[Finding]:
    """Yield what is wrong in a program's main file, as warnings.

    Args:
        source: The file's text; one that is no Python has no findings.
        name: What to call the file.
        subprocesses: ``run.subprocesses``.
        threads: What the CPU plan gives to each; None where nobody knows the node.
    """
    try:
        program = _Program.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    checks = (
        program.unguarded(),
        program.forks_after_threads(),
        program.too_many_threads(threads),
        program.uncounted(subprocesses, threads),
    )
    for line, message, fix in filter(None, checks):
        yield Finding("run.program", f"{name}:{line}: {message}", fix, fatal=False)


class _Mistake(NamedTuple):
    line: int
    message: str
    fix: str


class _Program(NamedTuple):
    tree: ast.Module
    names: Mapping[str, str]
    """What is imported or assigned by which name, dotted; torch.multiprocessing counts as multiprocessing."""
    functions: Mapping[str, _Functions]

    @classmethod
    def parse(cls, source: str) -> "_Program":
        tree = ast.parse(source)
        functions = {node.name: node for node in tree.body if isinstance(node, _Functions)}
        names: dict[str, str] = {}
        program = cls(tree, names, functions)
        for node in ast.walk(tree):  # a file's imports come first
            names.update(program._bound(node))
        return program

    def unguarded(self) -> _Mistake | None:
        """Find processes that are started where the file is imported, by methods that import it anew."""
        for call in _calls(_executed(self.tree.body, guarded=False)):
            start = self._start(call, set())
            if start is None or self._method(start) not in _IMPORT_AGAIN:
                continue
            through = "" if start is call else f" ({ast.unparse(call.func)}(), in line {start.lineno})"
            return _Mistake(
                call.lineno,
                f"processes are started at module level{through}: under {self._method(start)} each of them "
                "imports this file, and would start processes again",
                'Put the call under `if __name__ == "__main__":`',
            )
        return None

    def forks_after_threads(self) -> _Mistake | None:
        """Find processes that are forked below a line, of the same block, that starts threads."""
        for body in (self.tree.body, *(function.body for function in self.functions.values())):
            calls = sorted(_calls(_executed(body, guarded=True)), key=lambda call: call.lineno)
            start = next((call for call in calls if self._name(call.func) in _STARTERS), None)
            threads = next((call for call in calls if self._makes_threads(call)), None)
            if start and threads and threads.lineno < start.lineno and self._method(start) == "fork":
                return _Mistake(
                    start.lineno,
                    f"processes are forked after threads were started (line {threads.lineno}: "
                    f"{ast.unparse(threads.func)}): a lock that one of them holds stays held in the fork",
                    "Start the processes before, or by spawn",
                )
        return None

    def too_many_threads(self, threads: int | None) -> _Mistake | None:
        """Find a number of threads that is more than the CPU plan's."""
        for node in ast.walk(self.tree) if threads else ():
            what, number = self._threads_set(node)
            if threads and number > threads:
                message = f"{what} wins over the CPU plan's {threads}: oversubscribed"
                return _Mistake(getattr(node, "lineno", 1), message, "Leave it out to have the plan's")
        return None

    def uncounted(self, subprocesses: int, threads: int | None) -> _Mistake | None:
        """Find processes that the CPU plan knows nothing of: each would take all threads of its rank."""
        sets_threads = any(self._name(call.func) == _SET_THREADS for call in _calls(ast.walk(self.tree)))
        with_torch = any(name.split(".")[0] == "torch" for name in self._imported())
        if subprocesses > 1 or threads == 1 or sets_threads or not with_torch:
            return None
        for call in _calls(ast.walk(self.tree)):
            if self._name(call.func) in _STARTERS:
                each = f"{threads} threads" if threads else "threads"
                return _Mistake(
                    call.lineno,
                    f"processes are started, and run.subprocesses is 1: each takes the {each} of its rank",
                    "Set run.subprocesses to the number of processes that compute at a time",
                )
        return None

    def _imported(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""

    def _bound(self, node: ast.AST) -> dict[str, str]:
        """Tell what a statement binds to which name."""
        if isinstance(node, ast.Import):
            return {alias.asname: _plain(alias.name) for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom):
            return {each.asname or each.name: _plain(f"{node.module}.{each.name}") for each in node.names}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = self._name(node.value)
            return {node.targets[0].id: name} if name == "multiprocessing" else {}
        if isinstance(node, ast.ClassDef) and "multiprocessing.Process" in map(self._name, node.bases):
            return {node.name: "multiprocessing.Process"}
        return {}

    def _name(self, node: ast.expr) -> str:
        """Find what an expression stands for, dotted; a start method's context is a multiprocessing too."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return _plain(f"{self._name(node.value)}.{node.attr}")
        if isinstance(node, ast.Call) and self._name(node.func) == "multiprocessing.get_context":
            return "multiprocessing"
        return ""

    def _start(self, call: ast.Call, seen: set[str]) -> ast.Call | None:
        """Find where a call starts processes: itself, or in a function of this file."""
        name = self._name(call.func)
        if name in _STARTERS:
            return call
        if name in seen or name not in self.functions:
            return None
        calls = _calls(_executed(self.functions[name].body, guarded=False))
        starts = (self._start(each, seen | {name}) for each in calls)
        return next((start for start in starts if start), None)

    def _method(self, start: ast.Call) -> object:
        """Tell by which method processes are started; None where the file leaves it open."""
        if self._name(start.func) == _ALWAYS_SPAWN:
            return "spawn"
        methods = {_literal(each) for each in self._choices()}
        return methods.pop() if len(methods) == 1 else None

    def _choices(self) -> Iterator[ast.expr | None]:
        for call in _calls(ast.walk(self.tree)):
            keyword = next(
                (each.value for each in call.keywords if each.arg in ("method", "start_method")), None
            )
            if self._name(call.func) in _CHOOSERS:
                yield keyword or next(iter(call.args), None)
            elif keyword and self._name(call.func) in _STARTERS:
                yield keyword

    def _makes_threads(self, call: ast.Call) -> bool:
        backward = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        return backward or self._name(call.func) in _MAKE_THREADS

    def _threads_set(self, node: ast.AST) -> tuple[str, int]:
        """Tell what sets a number of threads, and to which; 0 where it is none, or not written there."""
        value: ast.expr | None = None
        if isinstance(node, ast.Call) and self._name(node.func) == _SET_THREADS:
            value = next(iter(node.args), None)
        elif isinstance(node, ast.Assign) and _is_variable(node.targets[0]):
            value = node.value
        text = str(_literal(value))
        return (ast.unparse(node), int(text)) if text.isdecimal() else ("", 0)


def _plain(name: str) -> str:
    return name.removeprefix("torch.") if name.startswith("torch.multiprocessing") else name


def _literal(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is_variable(target: ast.expr) -> bool:
    key = target.slice if isinstance(target, ast.Subscript) else None
    return _literal(key) == "OMP_NUM_THREADS"


def _calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [node for node in nodes if isinstance(node, ast.Call)]


def _executed(body: Iterable[ast.AST], *, guarded: bool) -> Iterator[ast.AST]:
    """Walk what runs when a block does: no bodies of functions, and what is guarded only where asked for."""
    for node in body:
        if isinstance(node, _Functions | ast.Lambda):
            continue
        if isinstance(node, ast.If) and not guarded and _is_guard(node.test):
            continue
        yield node
        yield from _executed(ast.iter_child_nodes(node), guarded=guarded)


def _is_guard(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
