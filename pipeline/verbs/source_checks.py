"""Check the source of a program without running it: how it starts processes, and where it writes files.

A check warns only about mistakes that the source shows. It ignores a start method that is chosen at run time,
and processes that another module starts.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

from manycpu.pipeline.spec.errors import Finding

_PROCESS_STARTERS: Final = {
    "multiprocessing.Pool",
    "multiprocessing.Process",
    "multiprocessing.spawn",  # in torch only
    "multiprocessing.start_processes",
    "concurrent.futures.ProcessPoolExecutor",
}
_ALWAYS_SPAWN: Final = "multiprocessing.spawn"
_METHOD_CHOOSERS: Final = {"multiprocessing.get_context", "multiprocessing.set_start_method"}
_IMPORT_AGAIN: Final = {"spawn", "forkserver"}  # start methods whose processes import the main file again
_THREAD_STARTERS: Final = {
    "concurrent.futures.ThreadPoolExecutor",
    "threading.Thread",
    "torch.distributed.init_process_group",
}
_SET_THREADS: Final = "torch.set_num_threads"

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_OUTPUTS: Final = {"output_dir", "output", "out", "save_dir", "save_path", "logging_dir", "checkpoint_dir"}
"""Options of programs, and parameters of functions, that name an output."""
_SAVERS: Final = {"save", "save_model", "save_pretrained", "save_state", "savefig", "to_csv", "write_text"}
_WRITE_MODES: Final = set("wax")  # in the mode of open()


def process_findings(source: str, name: str, subprocesses: int, threads: int | None) -> Iterator[Finding]:
    """Yield a warning for each kind of mistake in how a program's main file starts processes.

    Args:
        source: The text of the file.
        name: The name of the file, for messages.
        subprocesses: ``run.subprocesses``.
        threads: The threads of each computing process in the CPU plan; None: unknown.
    """
    try:
        program = _Program(source)
        checks = (
            program.unguarded_start(),
            program.forks_after_threads(),
            program.too_many_threads(threads),
            program.uncounted_processes(subprocesses, threads),
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for mistake in checks:
        if mistake is not None:
            message = f"{name}:{mistake.line}: {mistake.message}"
            yield Finding("run.program", message, mistake.fix, fatal=False)


class _Mistake(NamedTuple):
    """A mistake in a program: its line in the file, and a message and a fix for people."""

    line: int
    message: str
    fix: str


class _Program:
    """The source of a program. Each public method finds one kind of mistake, or returns None."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, _FunctionNode)}
        self.names: dict[str, str] = {}
        """Name in the file -> its full dotted name; torch.multiprocessing counts as multiprocessing."""
        # Breadth first: imports at the top come before the assignments and classes that use their names.
        for node in ast.walk(self.tree):
            self.names.update(self._names_bound_by(node))

    def unguarded_start(self) -> _Mistake | None:
        """Find processes that are started at module level, by a method that imports the file again.

        With these start methods (spawn, forkserver), each new process would start processes again.
        """
        for call in _calls(_executed_nodes(self.tree.body, guarded=False)):
            start = self._starting_call(call, callers=set())
            if start is None or self._start_method(start) not in _IMPORT_AGAIN:
                continue
            # The called function, if the processes are started there.
            through = "" if start is call else f" ({ast.unparse(call.func)}(), in line {start.lineno})"
            return _Mistake(
                call.lineno,
                f"processes are started at module level{through}: under {self._start_method(start)} each of "
                "them imports this file, and would start processes again",
                'Put the call under `if __name__ == "__main__":`',
            )
        return None

    def forks_after_threads(self) -> _Mistake | None:
        """Find processes that are forked after threads were started in the same function or module body."""
        for body in (self.tree.body, *(function.body for function in self.functions.values())):
            calls = sorted(_calls(_executed_nodes(body, guarded=True)), key=lambda call: call.lineno)
            start = next((call for call in calls if self._full_name(call.func) in _PROCESS_STARTERS), None)
            threads = next((call for call in calls if self._makes_threads(call)), None)
            if start and threads and threads.lineno < start.lineno and self._start_method(start) == "fork":
                return _Mistake(
                    start.lineno,
                    f"processes are forked after threads were started (line {threads.lineno}: "
                    f"{ast.unparse(threads.func)}): a lock that one of them holds stays held in the fork",
                    "Start the processes before, or by spawn",
                )
        return None

    def _makes_threads(self, call: ast.Call) -> bool:
        """Whether a call starts threads: ``backward()`` of torch does too."""
        return self._full_name(call.func) in _THREAD_STARTERS or getattr(call.func, "attr", "") == "backward"

    def too_many_threads(self, threads: int | None) -> _Mistake | None:
        """Find a statement that sets more threads than ``threads``, the number in the CPU plan.

        ``threads`` None: the plan is unknown, and nothing is found.
        """
        for node in ast.walk(self.tree):
            value: ast.expr | None = None
            if isinstance(node, ast.Call) and self._full_name(node.func) == _SET_THREADS:
                value = next(iter(node.args), None)
            elif isinstance(node, ast.Assign):  # os.environ["OMP_NUM_THREADS"] = ...
                target = node.targets[0]
                key = target.slice if isinstance(target, ast.Subscript) else None
                value = node.value if _constant(key) == "OMP_NUM_THREADS" else None
            text = str(_constant(value))  # a number, or a text in os.environ; "None": there is no constant
            if threads and text.isdecimal() and int(text) > threads:
                message = f"{ast.unparse(node)} wins over the CPU plan's {threads}: oversubscribed"
                return _Mistake(getattr(node, "lineno", 1), message, "Leave it out to have the plan's")
        return None

    def uncounted_processes(self, subprocesses: int, threads: int | None) -> _Mistake | None:
        """Find processes that ``run.subprocesses`` does not count: each would use all threads of its rank."""
        calls = _calls(ast.walk(self.tree))
        imported: list[str] = []  # full names of modules
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported.append(node.module or "")
        imports_torch = any(name.split(".")[0] == "torch" for name in imported)
        sets_threads = any(self._full_name(call.func) == _SET_THREADS for call in calls)
        # In these cases the processes are counted, or cannot compute with more threads than planned.
        if subprocesses > 1 or threads == 1 or sets_threads or not imports_torch:
            return None
        for call in calls:
            if self._full_name(call.func) in _PROCESS_STARTERS:
                amount = f"{threads} threads" if threads else "threads"
                return _Mistake(
                    call.lineno,
                    f"processes are started, and run.subprocesses is 1: each takes the {amount} of its rank",
                    "Set run.subprocesses to the number of processes that compute at a time",
                )
        return None

    def _names_bound_by(self, node: ast.AST) -> dict[str, str]:
        """Map each name that a statement binds to the full dotted name of its value.

        Of assignments and classes, only those of multiprocessing are mapped. ``import a.b`` needs no entry:
        its name is the full name.
        """
        if isinstance(node, ast.Import):
            return {alias.asname: _without_torch(alias.name) for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom):
            return {
                imported.asname or imported.name: _without_torch(f"{node.module}.{imported.name}")
                for imported in node.names
            }
        # Such as ``mp = get_context("spawn")``.
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = self._full_name(node.value)
            return {node.targets[0].id: name} if name == "multiprocessing" else {}
        if isinstance(node, ast.ClassDef) and "multiprocessing.Process" in map(self._full_name, node.bases):
            return {node.name: "multiprocessing.Process"}
        return {}

    def _full_name(self, node: ast.expr) -> str:
        """Return the full dotted name of what an expression names; empty: the expression is no name.

        A call of ``get_context()`` counts as the name ``multiprocessing``.
        """
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return _without_torch(f"{self._full_name(node.value)}.{node.attr}")
        if isinstance(node, ast.Call) and self._full_name(node.func) == "multiprocessing.get_context":
            return "multiprocessing"
        return ""

    def _starting_call(self, call: ast.Call, callers: set[str]) -> ast.Call | None:
        """Find the call that starts processes: ``call`` itself, or one in a function that it calls.

        Only functions of this file are searched. ``callers``: functions that are being searched already, and
        are not entered again. None: the call starts no processes.
        """
        name = self._full_name(call.func)
        if name in _PROCESS_STARTERS:
            return call
        if name in callers or name not in self.functions:
            return None
        for inner in _calls(_executed_nodes(self.functions[name].body, guarded=False)):
            start = self._starting_call(inner, callers | {name})
            if start is not None:
                return start
        return None

    def _start_method(self, start: ast.Call) -> object:
        """Return the start method of the processes that ``start`` starts; None: unknown.

        It is known only if every call in the file that sets a start method sets the same constant. Which
        processes use which context is not examined.
        """
        if self._full_name(start.func) == _ALWAYS_SPAWN:
            return "spawn"
        methods = set()
        for call in _calls(ast.walk(self.tree)):
            by_name = {keyword.arg: keyword.value for keyword in call.keywords}
            method = by_name.get("method") or by_name.get("start_method")
            if self._full_name(call.func) in _METHOD_CHOOSERS:
                methods.add(_constant(method or next(iter(call.args), None)))
            elif method and self._full_name(call.func) in _PROCESS_STARTERS:
                methods.add(_constant(method))
        return methods.pop() if len(methods) == 1 else None


def _without_torch(name: str) -> str:
    """Remove ``torch.`` from ``torch.multiprocessing...``: it has the same names as multiprocessing."""
    return name.removeprefix("torch.") if name.startswith("torch.multiprocessing") else name


def _constant(node: ast.expr | None) -> object:
    """Return the value of a constant; None: the expression is something else, or missing."""
    return node.value if isinstance(node, ast.Constant) else None


def _calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """Select the calls among nodes."""
    return [node for node in nodes if isinstance(node, ast.Call)]


def _executed_nodes(body: Iterable[ast.AST], *, guarded: bool) -> Iterator[ast.AST]:
    """Yield the syntax nodes that run when ``body`` runs; bodies of functions are left out.

    ``guarded`` True: also those below ``if __name__ == "__main__"``, as in the program itself. False: without
    them, as in an import of the file.
    """
    for node in body:
        if isinstance(node, _FunctionNode | ast.Lambda):
            continue
        if isinstance(node, ast.If) and not guarded:
            tested = ast.walk(node.test)
            if any(isinstance(name, ast.Name) and name.id == "__name__" for name in tested):
                continue
        yield node
        yield from _executed_nodes(ast.iter_child_nodes(node), guarded=guarded)


class Written(NamedTuple):
    """A path below the working folder, and the option or line that names it."""

    path: str
    where: str


def relative_writes(source: str, args: Sequence[str] = ()) -> Iterator[Written]:
    """Yield the relative paths that a program writes to, first in its arguments, then in its source.

    >>> list(relative_writes("torch.save(model, 'model.pt')", ["--output_dir", "out"]))
    [Written(path='out', where='--output_dir'), Written(path='model.pt', where='line 1')]
    """
    # The last use of an option counts.
    by_option = {_option_name(option): Written(value, option) for option, value in _output_options(args)}
    for written in by_option.values():
        if _is_relative(written.path):
            yield written
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (
                Written(path, f"line {node.lineno}") for path in _relative_paths_written(node, {*by_option})
            )


def _output_options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that name an output, each with its value, after ``=`` or in the next word."""
    for option, following in zip(args, [*args[1:], ""], strict=False):  # each word with the next one
        name, equals, value = option.partition("=")
        if name.startswith("--") and _option_name(name) in _OUTPUTS:
            yield name, value if equals else following


def _option_name(option: str) -> str:
    """Return an option's name as Python's parameters have it: ``output_dir`` for ``--output-dir``."""
    return option.lstrip("-").replace("-", "_")


def _relative_paths_written(call: ast.Call, given_options: set[str]) -> Iterator[str]:
    """Yield the relative paths that a call writes to, as far as its arguments are constants.

    ``given_options``: options that the program's arguments give. Their defaults in the source do not count.
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    texts = [_text(argument) for argument in call.args]
    keywords = {keyword.arg: _text(keyword.value) for keyword in call.keywords}
    if name == "open":
        second = texts[1] if len(texts) > 1 else None
        mode = keywords.get("mode") or second or "r"
        paths = texts[:1] if _WRITE_MODES & {*mode} else []  # a letter of the mode is w, a or x
    elif name == "write_text":
        inner = getattr(call.func, "value", None)  # Path(...), whose argument is the path
        paths = [*map(_text, inner.args[:1])] if isinstance(inner, ast.Call) else []
    elif name == "add_argument":
        names_output = _option_name((texts[0] if texts else None) or "") in _OUTPUTS - given_options
        paths = [keywords.get("default")] if names_output else []
    else:  # such as TrainingArguments(output_dir="out")
        paths = [keywords.get(option) for option in _OUTPUTS - given_options]
        if name in _SAVERS:
            paths = texts[:2] + paths  # the path is the first argument or, after what to save, the second
    yield from (path for path in paths if path and _is_relative(path))


def _text(node: ast.expr) -> str | None:
    """Return the value of a text constant; None: the expression is something else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_relative(text: str) -> bool:
    """Whether a text is a relative path, and no option, placeholder, variable or URL."""
    is_other = text.startswith(("-", "{", "$")) or "://" in text or PurePath(text).is_absolute()
    return bool(text) and not is_other
