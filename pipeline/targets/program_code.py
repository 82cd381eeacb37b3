"""Find the code of a run's program: its folder, the files there that are code, and modules that it misses."""

import ast
import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pathspec import GitIgnoreSpec, PathSpec
from rich.filesize import decimal

from manycpu.pipeline import run_report, transfer
from manycpu.pipeline.adapters.disk import walk
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger.file import is_run
from manycpu.pipeline.runfile import is_run_file
from manycpu.pipeline.spec import output, program
from manycpu.pipeline.spec.errors import BadInputError, BuildError, Finding
from manycpu.pipeline.spec.naming import is_key
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.transfer import Manifest

_PROJECT_MARKS = (".git", "pyproject.toml")  # a folder that has one of them is the root of a project
_MAX_BYTES, _MAX_FILES = 100 << 20, 10_000
_NOT_CODE = {"__pycache__", "node_modules", "site-packages"}
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # a folder that has one of them is an environment of Python
_MANYCPU_FOLDER = Path(__file__).resolve().parents[1]
_GITIGNORE, DOCKERIGNORE = ".gitignore", ".dockerignore"
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_SOURCES_FOLDER = "src"  # folder in which a project may keep its packages

Ignored = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The .gitignore files that apply to a folder, the nearest first, each with the folder that it is in."""


def program_of(ctx: RunContext) -> tuple[Path | None, tuple[str, ...]]:
    """Find the folder of the program's code, and the arguments of Python that run the program from there.

    The folder is None if the program is a recipe, or a module that is installed.
    """
    kind, name = program.parse(ctx.run.program)
    root = _code_folder(ctx.run, ctx.base)
    if ctx.run.code is not None and (fault := _fault_of_code_field(ctx, root, kind, name)):
        raise BadInputError(fault, field="run.code", fix="Name a folder around the program, or leave it out")
    if kind == "script":
        script = Path(name)
        folder = root or script.parent
        return folder, (script.relative_to(folder).as_posix(),)
    # No code folder: a module beside the run file is code all the same, and not an installed module.
    if root is None and kind == "module" and has_module(ctx.base, name):
        root = ctx.base
    return root, ("-m", name)


def _code_folder(run: TrainingRun, base: Path) -> Path | None:
    """Find the folder that ``run.code`` names; for ``auto``, the nearest project folder around the program.

    None: the field is not set, or no folder around the program is a project.
    """
    if run.code != program.AUTO:
        return base / run.code if run.code else None
    kind, name = program.parse(run.program)
    start = (Path(base / name).parent if kind == "script" else base).absolute()
    return next((folder for folder in (start, *start.parents) if _is_project(folder)), None)


def _is_project(folder: Path) -> bool:
    """Whether a folder is the root of a project, with .git or pyproject.toml."""
    return any((folder / mark).exists() for mark in _PROJECT_MARKS)


def _fault_of_code_field(ctx: RunContext, root: Path | None, kind: str, name: str) -> str:
    """Say what is wrong with ``run.code``; empty: nothing is.

    ``root`` is the folder that was found for it; ``kind`` and ``name`` are those of the program.
    """
    if kind == "recipe":
        return f"the recipe {ctx.run.program} has its code in manycpu"
    if root is None:
        return f"no folder around the program has {' or '.join(_PROJECT_MARKS)}"
    if not root.is_dir():
        return f"there is no folder {ctx.run.code}"
    if kind == "module" and not has_module(root, name):
        return f"there is no module {name} in {root}"
    if kind == "script" and not Path(name).is_relative_to(root):
        return f"{name} is not in {root}"
    return ""


def main_file(run: TrainingRun, base: Path) -> Path | None:
    """Find the file that starts the program; None: the program is installed, a recipe, or missing."""
    kind, name = program.parse(run.program)
    candidates: list[Path] = []
    if kind == "script":
        candidates = [base / name]
    elif kind == "module":
        module = Path(_code_folder(run, base) or base, *name.split("."))
        candidates = [module.with_suffix(".py"), module / "__main__.py"]
    return next((path for path in candidates if path.is_file()), None)


def has_module(folder: Path, name: str) -> bool:
    """Whether a folder has a module, such as ``package.train``; a package counts as one."""
    *packages, last = name.split(".")
    parent = folder.joinpath(*packages)
    return (parent / last).is_dir() or (parent / f"{last}.py").is_file() or any(parent.glob(f"{last}.*.so"))


def installed(module: str) -> bool:
    """Whether a module is installed in this environment."""
    try:
        return importlib.util.find_spec(module.split(".", 1)[0]) is not None
    except ValueError:  # such as __main__, which has no spec
        return False


def installed_digest() -> str:
    """Hash the code of manycpu that runs inside a training process.

    After an update of manycpu it differs: then a task does not reuse what an earlier task built.
    """
    packages = ("node", "recipes", "spec")
    files = [path for package in packages for path in sorted((_MANYCPU_FOLDER / package).rglob("*.py"))]
    paths = [path.relative_to(_MANYCPU_FOLDER).as_posix() for path in files]
    source = Location.of(str(_MANYCPU_FOLDER), field="run.program").only(paths)
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
        return Location.of(str(self.root), field="run.program").only(sorted(self.files))

    def __str__(self) -> str:
        """Describe the code for logs and errors: number of files, size, and the three largest."""
        size = decimal(sum(self.files.values()))
        files = sum(not path.endswith("/") for path in self.files)
        three_largest = sorted(self.files.items(), key=lambda item: item[1], reverse=True)[:3]
        largest = ", ".join(f"{path} ({decimal(size_bytes)})" for path, size_bytes in three_largest)
        return f"{files} file(s) of {self.root}, {size}; the largest: {largest}"


def code_of(ctx: RunContext, root: Path, program: tuple[str, ...]) -> Code:
    """Select the files of a program's folder that are code: all but data, outputs and ignored files.

    Args:
        ctx: The run.
        root: The folder.
        program: The arguments of Python that run the program, as :func:`program_of` returns them.

    Raises:
        BadInputError: The files are too many or too large for code, or the program is not among them.
        BuildError: A folder cannot be listed.
    """
    code = Code(root, files={})
    for path in _code_files(root, _excluded(ctx)):
        if _is_same_file(root / path, ctx.run_file) or is_run_file(root / path):
            continue
        code.files[path] = 0 if path.endswith("/") else (root / path).stat().st_size
        if len(code.files) > _MAX_FILES:
            break  # a search of all files might take long, and is refused below anyway
    if len(code.files) > _MAX_FILES or sum(code.files.values()) > _MAX_BYTES:
        raise BadInputError(
            f"more than {_MAX_BYTES >> 20} MiB or {_MAX_FILES:,} files are more than code: {code}",
            field="run.program",
            fix=f"Name what is no code in {_GITIGNORE} or {DOCKERIGNORE}, or put the program into a folder "
            "of its own; data and models go into run.data and run.model",
        )
    *module_option, name = program
    if module_option:  # -m: the top package or module must be code
        top = name.split(".", 1)[0]
        program_path = _module_path(root, top)
        is_code = _is_module_among(Path(top), code.files)
    else:
        program_path = root / name
        is_code = name in code.files
    if not is_code:
        why, fix = _why_left_out(ctx, root, program_path)
        raise BadInputError(f"{name} {why}", field="run.program", fix=fix)
    return code


def _excluded(ctx: RunContext) -> set[Path]:
    """Return paths that are never code: those that fields of the run name, and manycpu's own folder.

    The code may be around or in manycpu's own folder: :func:`_is_own` finds what manycpu made there.
    """
    run, home = ctx.run, ctx.driver.home(ctx)
    fields = (run.data, run.model, run.output, run.checkpoints, run.resume_from)
    named = {Path(path) for path in fields if path and "://" not in path}
    return named | ({home, home / "runs", home / "caches"} if home else set())


def _module_path(folder: Path, module: str) -> Path:
    """Return the path of a top-level module in a folder: a package, or a file."""
    return folder / module if (folder / module).is_dir() else folder / f"{module}.py"


def _is_module_among(module: Path, files: Iterable[str]) -> bool:
    """Whether ``files`` has a module: the path ``module`` with .py, or a file below it, as in a package."""
    return any(file == f"{module}.py" or file.startswith(f"{module}/") for file in files)


def _why_left_out(ctx: RunContext, root: Path, path: Path) -> tuple[str, str]:
    """Explain why a file or folder does not count as code: return the reason, and the fix."""
    if _is_same_file(path, ctx.run_file) or is_run_file(path):
        return "is a run file, and no program", "Give the script that trains, or `-m module`"
    if path in _excluded(ctx):
        why = "is named as data, model, output or checkpoints of this run too, which are no code"
        return why, "Give them a path of their own"
    if not _has_name_of_code(path):
        return "has a name that is not taken for code", "Give it another"
    around = [folder for folder in (path, *path.parents) if folder.is_relative_to(root) and folder != root]
    excluded = _excluded(ctx)
    left_out = next((folder for folder in around if _is_own(folder) or folder in excluded), None)
    why = ""
    if any(map(_is_environment, (root, *around))):
        why = "is in an environment of Python, which is no code"
    elif _is_output(path):
        why = f"is in {path}, where a run wrote its model or report"
    elif left_out:
        why = f"is in {left_out}, which manycpu made, or which the run names as data, model or checkpoints"
    if why:
        return why, "Give the program a folder of its own"
    fix = "Let them have it (`!name`), or put the program into a folder of its own"
    return f"is among what {_GITIGNORE} or {DOCKERIGNORE} of {root} leave out", fix


def _is_same_file(path: Path, file: Path | None) -> bool:
    """Whether two paths, perhaps through links, lead to the same file; false if ``file`` does not exist."""
    return file is not None and file.exists() and path.samefile(file)


def _code_files(root: Path, excluded: set[Path]) -> Iterator[str]:
    """Yield the paths, below ``root``, of files and empty folders that are code; skip ``excluded`` paths."""
    docker = docker_patterns(root / DOCKERIGNORE)
    repository = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root)
    # As in git, the .gitignore files of parent folders count, up to the root of the repository.
    parents = [folder for folder in root.parents if folder.is_relative_to(repository)]
    # Folder -> the rules for its content. `walk` visits a folder before its subfolders.
    # The parent of `root` stands for all folders above it.
    rules_by_folder: dict[Path, Ignored] = {
        root.parent: tuple(rule for folder in parents for rule in _git_rules(folder))
    }
    for folder, folders, files in walk(root, "run.program", follow_links=True):
        current = Path(folder)
        rules = (*_git_rules(current), *rules_by_folder[current.parent])
        rules_by_folder[current] = rules
        if not folders and not files and current != root:
            empty_folder = current.relative_to(root).as_posix()
            if not docker_ignores(docker, empty_folder):  # .gitignore has let `walk` enter it
                yield f"{empty_folder}/"
        # Not by .dockerignore: a later pattern may include a file of an ignored folder again.
        folders[:] = [  # `walk` searches only these
            name
            for name in folders
            if _is_code(current / name, excluded, rules, end="/")
            and not _is_environment(current / name)
            and not _is_output(current / name)
            and not _is_own(current / name)
            and not _is_link_to_skip(current / name, root, excluded)
        ]
        for name in files:
            path = current / name
            relative = path.relative_to(root).as_posix()
            if transfer.is_copy(path):  # the marker of one
                continue
            if _is_code(path, excluded, rules) and not docker_ignores(docker, relative) and path.is_file():
                yield relative


def _is_code(path: Path, excluded: set[Path], rules: Ignored, end: str = "") -> bool:
    """Whether a path counts as code by its name and .gitignore; ``end`` is a slash if it is a folder."""
    if not _has_name_of_code(path) or path in excluded:
        return False
    for folder, spec in rules:  # the nearest .gitignore with a matching pattern decides
        included = spec.check_file(path.relative_to(folder).as_posix() + end).include
        if included is not None:
            return not included
    return True


def _has_name_of_code(path: Path) -> bool:
    """Whether a path may be code by its name: not hidden, no bytecode, no installed packages."""
    return not path.name.startswith(".") and path.name not in _NOT_CODE and path.suffix != ".pyc"


def _is_environment(folder: Path) -> bool:
    """Whether a folder is an environment of Python, as venv, virtualenv and conda make it."""
    return os.access(folder, os.X_OK) and any((folder / mark).exists() for mark in _ENVIRONMENT_MARKS)


def _is_link_to_skip(path: Path, root: Path, excluded: set[Path]) -> bool:
    """Whether a path is a link to a folder around itself (a search would not end), or to what is no code.

    No code are the ``excluded`` paths, what manycpu made, and what is in that.
    """
    if not path.is_symlink():
        return False
    target = path.resolve()
    if target in {excluded_path.resolve() for excluded_path in excluded}:
        return True
    resolved_root = root.resolve()
    if any(_is_own(path) for path in (target, *target.parents) if not resolved_root.is_relative_to(path)):
        return True
    parents = [folder.resolve() for folder in path.parents if folder.is_relative_to(root)]
    return any(folder.is_relative_to(target) for folder in parents)


def _git_rules(folder: Path) -> Ignored:
    """Read the rules in the .gitignore of a folder; empty: it has none."""
    file = folder / _GITIGNORE
    return ((folder, GitIgnoreSpec.from_lines(_usable(_lines(file)))),) if file.is_file() else ()


def docker_patterns(file: Path) -> "PathSpec[Any]":  # in quotes: not generic before pathspec 1.1
    """Read the patterns of a .dockerignore; none if it does not exist.

    They are translated to the syntax of .gitignore, which the library can match.
    """
    patterns = []
    for line in _lines(file) if file.is_file() else ():
        text = line.strip()
        if not text or line.startswith("#"):  # a comment
            continue
        negation = "!" if text.startswith("!") else ""
        # As docker does: without a leading slash, and without "." and ".." in it.
        pattern = os.path.normpath(text.removeprefix("!").lstrip(" /"))
        patterns.append(f"{negation}/{pattern}")  # a slash: docker's patterns begin at the root
    return PathSpec.from_lines("gitignore", _usable(patterns))


def docker_ignores(docker: "PathSpec[Any]", path: str) -> bool:
    """Whether .dockerignore excludes a path: the last pattern that matches it or a parent folder decides."""
    parts = path.split("/")
    checks = [docker.check_file("/".join(parts[:end])) for end in range(1, len(parts) + 1)]
    # The index is the number of the pattern that matched.
    matching = [check for check in checks if check.index is not None]
    if not matching:
        return False
    return bool(max(matching, key=lambda check: check.index or 0).include)


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8-sig", errors="replace").splitlines()  # editors may write a BOM


def _usable(patterns: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are patterns: as git does, skip others, such as a backslash at the end."""
    for pattern in patterns:
        with suppress(ValueError):
            GitIgnoreSpec.from_lines([pattern])  # raises ValueError if it is no pattern
            yield pattern


def _is_output(folder: Path) -> bool:
    """Whether a folder is the output of a run: it has the report of a run, or the manifest of a model."""
    if not os.access(folder, os.X_OK):  # the walk reports it, unless the folder is ignored
        return False
    report = folder / output.REPORT
    if report.is_file() and run_report.parse(report.read_text(errors="replace")):
        return True
    # A manifest may have several names, because a program may have written a file of the first.
    for name in output.manifests(has=lambda name: (folder / name).exists()):
        manifest = folder / name
        with suppress(ValueError):  # it is no manifest; a manifest without files is of no model
            if manifest.is_file() and Manifest.parse(manifest.read_text(errors="replace"))[0].files:
                return True
    return False


def _is_own(folder: Path) -> bool:
    """Whether a folder is a run's, a staged copy, or that of a function's module, which manycpu made.

    It may lie anywhere: another target of the project may have had its folder there.
    """
    has_module = folder.parent.name == "functions" and is_key(folder.name)
    return has_module or is_run(folder) or transfer.is_copy(folder)


def import_findings(ctx: RunContext) -> Iterator[Finding]:
    """Yield a warning for each module that the program's main file imports and its code lacks."""
    file = main_file(ctx.run, ctx.base)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # Python reports it when it starts the program
    imported = [(name, line) for name, line in _imported_modules(tree.body) if not installed(name)]
    if not imported:
        return
    files = _files_of_code(ctx)
    reported = set[str]()
    for name, line in imported:
        if name not in reported and (outside := _find_outside_code(ctx, name, files)):
            reported.add(name)
            message, fix = outside
            yield Finding("run.code", f"{file.name}:{line}: {message}", fix, fatal=False)


def _files_of_code(ctx: RunContext) -> Collection[str]:
    """Return the files of the code, by path below its folder; none: the code has no folder."""
    root, arguments = program_of(ctx)
    return code_of(ctx, root, arguments).files if root else ()


def hint(ctx: RunContext, lines: Iterable[str]) -> str | None:
    """Say how a failed program can find the module that it missed, if that is near its code.

    ``lines`` are the last lines that the program wrote. None: they name no missing module, or the module is
    not near the code.
    """
    names = [match[1] for line in lines if (match := _MISSING_MODULE.search(line))]
    try:
        outside = _find_outside_code(ctx, names[-1], _files_of_code(ctx)) if names else None
    except (BadInputError, BuildError, OSError):  # such as a wrong run.code: the code's folder is unknown
        return None
    return outside and ". ".join(outside)


def _find_outside_code(ctx: RunContext, module: str, files: Collection[str]) -> tuple[str, str] | None:
    """Find a module that is not in the code's ``files``, in its folder and those around it in the project.

    Returns:
        Where it is, and the fix, as sentences for people; None: it is in the code, or nowhere.
    """
    root, program = program_of(ctx)
    if root is None:
        return None
    # Python searches the folder of the code and the folder of the script, which `-m module` does not have.
    # The last word is the script's path below `root`, or the module's name: then the parent is `root` again.
    searched = (root, (root / program[-1]).parent)
    found = [folder for folder in searched if has_module(folder, module)]
    if any(_is_module_among((folder / module).relative_to(root), files) for folder in found):
        return None
    if found:
        why, fix = _why_left_out(ctx, root, _module_path(found[0], module))
        return f"{module} {why}", fix
    for folder in root.parents:
        for sources in (folder, folder / _SOURCES_FOLDER):
            if has_module(sources, module):
                # Python searches the code's folder by itself, but not a folder in it.
                also_set = "" if sources == folder else f" and run.env to {{PYTHONPATH: {_SOURCES_FOLDER}}}"
                return (
                    f"{module} is in {sources}, and the code is {root} alone",
                    f"Set run.code to {folder}{also_set}",
                )
        if _is_project(folder):
            return None
    return None


def _imported_modules(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield the name of each top-level module that a file always imports, and the number of the line.

    Imports in functions, and below ``try`` or ``if``, do not count; nor do relative imports.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno
