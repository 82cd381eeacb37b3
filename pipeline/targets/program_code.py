"""Find the code of a run's program: its folder, the files there that are code, and modules that it misses."""

import ast
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pathspec import GitIgnoreSpec, PathSpec
from rich.filesize import decimal

from manycpu.pipeline import run_report, transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.runfile import is_run_file
from manycpu.pipeline.spec import output, program
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.transfer import Manifest

_PROJECT = (".git", "pyproject.toml")
_MAX_BYTES, _MAX_FILES = 100 << 20, 10_000
_NOT_CODE = {"__pycache__", "node_modules", "venv", "env", "site-packages"}
_PACKAGE = Path(__file__).resolve().parents[1]
_GIT, _DOCKER = ".gitignore", ".dockerignore"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_SOURCES = "src"  # folder in which a project may keep its packages

Ignored = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The .gitignore files that apply to a folder, the nearest first, each with the folder that it is in."""


def program_of(ctx: RunContext) -> tuple[Path | None, tuple[str, ...]]:
    """Find the folder of the program's code, and the arguments of Python that run the program from there."""
    kind, name = program.parse(ctx.run.program)
    root = _code_folder(ctx.run, ctx.base)
    if ctx.run.code is not None and (fault := _fault(ctx, root, kind, name)):
        raise BadInputError(fault, field="run.code", fix="Name a folder around the program, or leave it out")
    if kind == "script":
        path = Path(name)
        return root or path.parent, (path.relative_to(root or path.parent).as_posix(),)
    if root is None and kind == "module" and has_module(ctx.base, name):
        root = ctx.base
    return root, ("-m", name)


def _code_folder(run: TrainingRun, base: Path) -> Path | None:
    """Find the folder that ``run.code`` names; None: it is not set, or no project folder was found."""
    if run.code != program.AUTO:
        return base / run.code if run.code else None
    kind, name = program.parse(run.program)
    near = (Path(base / name).parent if kind == "script" else base).absolute()
    return next((folder for folder in (near, *near.parents) if _is_project(folder)), None)


def _is_project(folder: Path) -> bool:
    """Whether a folder is the root of a project, with .git or pyproject.toml."""
    return any((folder / mark).exists() for mark in _PROJECT)


def _fault(ctx: RunContext, root: Path | None, kind: str, name: str) -> str:
    """Say what is wrong with ``run.code``; empty: nothing."""
    if kind == "recipe":
        return f"the recipe {ctx.run.program} has its code in manycpu"
    if root is None:
        return f"no folder around the program has {' or '.join(_PROJECT)}"
    if not root.is_dir():
        return f"there is no folder {ctx.run.code}"
    if kind == "module" and not has_module(root, name):
        return f"there is no module {name} in {root}"
    return "" if kind == "module" or Path(name).is_relative_to(root) else f"{name} is not in {root}"


def main_file(run: TrainingRun, base: Path) -> Path | None:
    """Find the main file of a program; None: the program is installed, a recipe, or missing."""
    kind, name = program.parse(run.program)
    module = Path(_code_folder(run, base) or base, *name.split("."))
    candidates = {
        "recipe": [],
        "script": [base / name],
        "module": [module.with_suffix(".py"), module / "__main__.py"],
    }
    return next((path for path in candidates[kind] if path.is_file()), None)


def has_module(folder: Path, name: str) -> bool:
    """Whether a folder has the module, or the package that contains it."""
    top = name.split(".", 1)[0]
    return (folder / top).is_dir() or (folder / f"{top}.py").is_file()


def installed(module: str) -> bool:
    """Whether a module is installed in this environment."""
    try:
        return importlib.util.find_spec(module.split(".", 1)[0]) is not None
    except ValueError:
        return False


def installed_digest() -> str:
    """Hash the code of manycpu that runs inside a training process."""
    parts = ("node", "recipes", "spec")
    files = [path for part in parts for path in sorted((_PACKAGE / part).rglob("*.py"))]
    source = Location.of(str(_PACKAGE), "run.program").only(
        [path.relative_to(_PACKAGE).as_posix() for path in files]
    )
    return transfer.scan(source).digest


class Code(NamedTuple):
    """The code of a program: its folder, and its files by path below it, each with its size in bytes.

    A path that ends with a slash is an empty folder.
    """

    root: Path
    files: dict[str, int]

    @property
    def location(self) -> Location:
        """The code's files, as a source to copy."""
        return Location.of(str(self.root), "run.program").only(sorted(self.files))

    def __str__(self) -> str:
        size = decimal(sum(self.files.values()))
        files = sum(not path.endswith("/") for path in self.files)
        largest = sorted(self.files, key=lambda path: self.files[path], reverse=True)[:3]
        named = ", ".join(f"{path} ({decimal(self.files[path])})" for path in largest)
        return f"{files} file(s) of {self.root}, {size}; the largest: {named}"


def code_of(ctx: RunContext, root: Path, program: tuple[str, ...]) -> Code:
    """Select the files of a program's folder that are code."""
    run = ctx.run
    named = (run.data, run.model, run.output, run.checkpoints, run.resume_from)
    excluded = {Path(path) for path in named if path and "://" not in path}
    code = Code(root, {})
    for path in _files(root, excluded | ({home} if (home := ctx.driver.home(ctx)) else set())):
        if _is(root / path, ctx.run_file) or is_run_file(root / path):
            continue
        code.files[path] = 0 if path.endswith("/") else (root / path).stat().st_size
        if len(code.files) > _MAX_FILES:
            break
    if len(code.files) > _MAX_FILES or sum(code.files.values()) > _MAX_BYTES:
        raise BadInputError(
            f"more than {_MAX_BYTES >> 20} MiB or {_MAX_FILES:,} files are more than code: {code}",
            field="run.program",
            fix=f"Name what is no code in {_GIT} or {_DOCKER}, or put the program into a folder of its own; "
            "data and models go into run.data and run.model",
        )
    *option, name = program
    place, is_code = root / name, name in code.files
    if option:
        top = name.split(".", 1)[0]
        place = root / top if (root / top).is_dir() else root / f"{top}.py"
        is_code = any(each == f"{top}.py" or each.startswith(f"{top}/") for each in code.files)
    if not is_code:
        why, fix = _why_left_out(ctx, root, place, excluded)
        raise BadInputError(f"{name} {why}", field="run.program", fix=fix)
    return code


def _why_left_out(ctx: RunContext, root: Path, path: Path, excluded: set[Path]) -> tuple[str, str]:
    """Explain why the program's file or folder does not count as code, and how to fix that."""
    if _is(path, ctx.run_file) or is_run_file(path):
        return "is a run file, and no program", "Give the script that trains, or `-m module`"
    if path in excluded:
        why = "is named as data, model, output or checkpoints of this run too, which are no code"
        return why, "Give them a path of their own"
    if not _has_name_of_code(path):
        return "has a name that is not taken for code", "Give it another"
    if _is_output(path):
        return f"is in {path}, where a run wrote its model or report", "Give the program a folder of its own"
    fix = "Let them have it (`!name`), or put the program into a folder of its own"
    return f"is among what {_GIT} or {_DOCKER} of {root} leave out", fix


def _is(path: Path, file: Path | None) -> bool:
    return file is not None and file.exists() and path.samefile(file)


def _files(root: Path, excluded: set[Path]) -> Iterator[str]:
    """List the files and empty folders that are code, by path; excluded folders are not searched."""
    docker = _docker(root)
    repository = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root)
    above = [folder for folder in root.parents if folder.is_relative_to(repository)]
    ignored: dict[Path, Ignored] = {root.parent: tuple(rule for folder in above for rule in _git(folder))}
    for folder, folders, files in os.walk(root, followlinks=True):
        current = Path(folder)
        rules = ignored[current] = (*_git(current), *ignored[current.parent])
        empty = current.relative_to(root).as_posix()
        if not folders and not files and current != root and not _docker_ignores(docker, empty):
            yield f"{empty}/"
        folders[:] = [
            name
            for name in folders
            if _is_code(current / name, excluded, rules, "/")
            and not _is_output(current / name)
            and not _leads_back(current / name, root, excluded)
        ]
        for name in files:
            path = current / name
            below = path.relative_to(root).as_posix()
            if _is_code(path, excluded, rules) and not _docker_ignores(docker, below) and path.is_file():
                yield below


def _is_code(path: Path, excluded: set[Path], rules: Ignored, end: str = "") -> bool:
    if not _has_name_of_code(path) or path in excluded:
        return False
    for folder, spec in rules:  # the nearest .gitignore with a matching pattern decides
        included = spec.check_file(path.relative_to(folder).as_posix() + end).include
        if included is not None:
            return not included
    return True


def _has_name_of_code(path: Path) -> bool:
    return not path.name.startswith(".") and path.name not in _NOT_CODE and path.suffix != ".pyc"


def _leads_back(path: Path, root: Path, excluded: set[Path]) -> bool:
    """Whether a link leads to a folder that contains it, or to an excluded path."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    around = (folder.resolve() for folder in path.parents if folder.is_relative_to(root))
    return target in {other.resolve() for other in excluded} or any(
        folder.is_relative_to(target) for folder in around
    )


def _git(folder: Path) -> Ignored:
    file = folder / _GIT
    return ((folder, GitIgnoreSpec.from_lines(_lines(file))),) if file.is_file() else ()


def _docker(root: Path) -> PathSpec[Any]:
    """Read the patterns of .dockerignore, which are relative to its folder."""
    lines = [line.strip() for line in _lines(root / _DOCKER)] if (root / _DOCKER).is_file() else []
    patterns = [(line.startswith("!"), os.path.normpath(line.lstrip("!/"))) for line in lines if line]
    return PathSpec.from_lines(
        "gitignore",
        [f"{'!' if again else ''}/{pattern}" for again, pattern in patterns if not pattern.startswith("#")],
    )


def _docker_ignores(docker: PathSpec[Any], path: str) -> bool:
    """Whether .dockerignore excludes a path: the last pattern that matches it or a parent folder decides."""
    parts = path.split("/")
    checks = [docker.check_file("/".join(parts[:end])) for end in range(1, len(parts) + 1)]
    matching = [each for each in checks if each.index is not None]
    return bool(matching and max(matching, key=lambda each: each.index or 0).include)


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()


def _is_output(folder: Path) -> bool:
    """Whether a folder has the manifest or the report of a run."""
    for name in (output.REPORT, *output.manifests(lambda name: (folder / name).exists())):
        text = (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""
        with suppress(ValueError):  # it is no manifest
            if run_report.parse(text) if name == output.REPORT else Manifest.parse(text)[0].files:
                return True
    return False


def import_findings(ctx: RunContext) -> Iterator[Finding]:
    """Yield a warning for each module that the program's main file imports and its code lacks."""
    file = main_file(ctx.run, ctx.base)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    seen: set[str] = set()
    for name, line in _imported(tree.body):
        if name not in seen and not installed(name) and (found := _outside(ctx, name)):
            seen.add(name)
            message, fix = found
            yield Finding("run.code", f"{file.name}:{line}: {message}", fix, fatal=False)


def hint(ctx: RunContext, lines: Iterable[str]) -> str | None:
    """Say how a failed program can find a module that is around its code; None: it missed no such module."""
    names = [match[1] for line in lines if (match := _MISSING.search(line))]
    try:
        found = _outside(ctx, names[-1]) if names else None
    except BadInputError:
        return None
    return found and ". ".join(found)


def _outside(ctx: RunContext, module: str) -> tuple[str, str] | None:
    """Find a module in the folders around the code, up to the project root; returns its place and a fix."""
    root, program = program_of(ctx)
    if root is None or any(has_module(folder, module) for folder in (root, (root / program[-1]).parent)):
        return None
    for folder in root.parents:
        for place in (folder, folder / _SOURCES):
            if has_module(place, module):
                way = "" if place == folder else f" and run.env to {{PYTHONPATH: {_SOURCES}}}"
                return (
                    f"{module} is in {place}, and the code is {root} alone",
                    f"Set run.code to {folder}{way}",
                )
        if _is_project(folder):
            return None
    return None


def _imported(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """List the top-level modules that a file always imports: none in functions, and none below try or if."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno
