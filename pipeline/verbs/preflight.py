"""preflight: check a run against its target; each finding names a field and a fix."""

import ast
import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import OddFileError
from manycpu.pipeline.adapters.storage import Location, is_remote, protocols
from manycpu.pipeline.launchers import device_refusals, refusals
from manycpu.pipeline.launchers.environment import PLACEHOLDERS
from manycpu.pipeline.recipes.image_classification import images
from manycpu.pipeline.recipes.question_answering import squad
from manycpu.pipeline.run_report import REPORT
from manycpu.pipeline.spec import cpu_plan, program
from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.targets import program_imports
from manycpu.pipeline.targets.context import OWN_FOLDERS, RunContext
from manycpu.pipeline.targets.output import not_empty, occupied
from manycpu.pipeline.targets.program_code import code_of, installed, main_file, module_root, program_of
from manycpu.pipeline.tracking import trackers
from manycpu.pipeline.verbs.source_checks import process_findings, relative_writes

__all__ = ["preflight"]

Findings = Iterator[Finding]
_IN_BRACES = re.compile(r"(?<![{$])\{(\s*\w+\s*)\}(?!\})")
"""Matches {word}, but neither ${word} of a shell nor {{word}} of a template."""
_LIKE = 0.8  # difflib ratio: `dta` and `ouput` are similar to a placeholder, `out` and `step` are not
_WORDS_LIKE_PLACEHOLDERS = frozenset({"date", "mode"})
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_OF_THE_HUB = ("datasets/", "spaces/", "buckets/")
_ANSWER_S = 5.0  # timeout for a web server; staging asks a slower one again
_READ_ONLY = ["dask", "data", "dvc", "gist", "git", "github", "http", "https", "libarchive", "reference"]
_CACHES = ["blockcache", "cached", "filecache", "simplecache"]
_NO_OUTPUT = {
    **dict.fromkeys([*_READ_ONLY, "tar", "zip"], "nothing can be written by {}"),
    **dict.fromkeys(_CACHES, "{} reads back a copy of its own, and not what arrived"),
    "memory": "what is written to {} ends with its process",
}
"""fsspec protocol -> why it cannot hold an output, according to its source."""


def preflight(ctx: RunContext) -> list[Finding]:
    """Run all checks of a run before anything starts; returns the findings, the fatal ones first."""
    findings = [finding for check in _CHECKS for finding in check(ctx)]
    return sorted([*findings, *ctx.driver.findings(ctx)], key=lambda finding: not finding.fatal)


def _launch_kind(ctx: RunContext) -> Findings:
    yield from refusals(ctx.run, ctx.target)


def _device(ctx: RunContext) -> Findings:
    yield from device_refusals(ctx.run, ctx.target)


def _program(ctx: RunContext) -> Findings:
    kind, name = program.parse(ctx.run.program)
    if kind == "script" and Path(name).is_dir():
        yield Finding("run.program", f"{name} is a folder", "Give the script in it that trains")
    elif kind == "script" and not Path(name).is_file():
        yield Finding(
            "run.program",
            f"there is no script {name}, and no recipe of that name",
            f"Give a script's path, `-m module`, or a recipe: {', '.join(program.RECIPES)}",
        )
    # An image may have modules that this environment lacks.
    missing = kind == "module" and module_root(name, ctx.base) is None and not installed(name)
    if missing and ctx.run.code is None and not ctx.target.has_image:
        yield Finding(
            "run.program",
            f"there is no module {name!r} in {ctx.base}, and none is installed",
            "Put it beside the run file, or install it into this environment",
        )


def _python(ctx: RunContext) -> Findings:
    """Find a syntax error in the program: fatal on this machine; other nodes may have a newer Python."""
    path = main_file(ctx.run, ctx.base)
    if path is None:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # the ranks print the warnings of Python
            ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        fix = "Mend it, or give another script"
        is_fatal = ctx.target.is_this_machine
        yield Finding("run.program", f"{path} is no Python: {why}{line}", fix, fatal=is_fatal)


def _code(ctx: RunContext) -> Findings:
    try:
        root, arguments = program_of(ctx)
        if root and root.is_dir() and (arguments[0] == "-m" or (root / arguments[0]).is_file()):
            code_of(ctx, root, arguments)
    except BadInputError as error:
        yield Finding(error.field or "run.program", error.message, error.fix or "")
    except OSError as error:
        yield _unreadable("run.program", error)


def _kept_nowhere(ctx: RunContext) -> Findings:
    """Warn if ``run.output`` is null and the program writes to its working folder, which is deleted."""
    path = main_file(ctx.run, ctx.base)
    if ctx.run.output is not None or path is None:
        return
    for path_written, where in relative_writes(path.read_text(errors="replace"), ctx.run.args):
        yield Finding(
            "run.output",
            f"{path.name} writes to {path_written!r} ({where}), in its working folder, which goes with the "
            "run: run.output is null, and nothing is kept",
            "Give run.output, and have the program write to {output}, or $MANYCPU_OUTPUT",
            fatal=False,
        )
        return


def _started_processes(ctx: RunContext) -> Findings:
    """Find mistakes in how the program starts processes itself."""
    path = main_file(ctx.run, ctx.base)
    if path is None:
        return
    here = ctx.target.is_this_machine
    threads = cpu_plan.plan(Machine.observe(), ctx.run.cpu_request).threads if here else None
    source = path.read_text(errors="replace")
    yield from process_findings(source, path.name, ctx.run.subprocesses, threads)


def _imports(ctx: RunContext) -> Findings:
    """Find modules that the program imports from a folder around its code: they do not travel with it."""
    with suppress(BadInputError):  # `_code` reports a wrong `run.code`
        yield from program_imports.findings(ctx)


def _hogwild(ctx: RunContext) -> Findings:
    """Find more than one rank for Hogwild in shared mode, whose model is in the memory of one rank."""
    run, words = ctx.run, " ".join(ctx.run.args).replace("=", " ")
    if run.program != "hogwild" or "--mode averaged" in words:
        return
    if run.nproc_per_node > 1 or run.nodes[1] > 1:
        fix = "Add --mode averaged to run.args, or set run.nnodes and run.nproc_per_node to 1"
        ranks = f"{run.nnodes} node(s) with {run.nproc_per_node} process(es) each"
        yield Finding(
            "run.args", f"--mode shared has one model in one rank's memory, and there are {ranks}", fix
        )


def _data(ctx: RunContext) -> Findings:
    yield from _source(ctx.run.data, "run.data", ctx.base)
    yield from _source(ctx.run.model, "run.model", ctx.base)


def _hub(ctx: RunContext) -> Findings:
    """Find a data set of Hugging Face's Hub whose URL is that of a model."""
    protocol, _, name = (ctx.run.data or "").partition("://")
    if protocol == "hf" and not name.startswith(_OF_THE_HUB):
        message = f"{ctx.run.data} is a model on the Hub, not a data set"
        yield Finding("run.data", message, f"Write a data set as hf://datasets/{name}", fatal=False)


def _source(url: str | None, field: str, base: Path) -> Findings:
    if url is None:
        return
    try:
        source = Location.of(url, field)
    except BadInputError as error:
        yield Finding(field, error.message, error.fix or "")
        return
    if source.local is None:  # staging checks the rest of a remote source
        with suppress(Exception):  # each fsspec protocol raises its own error types
            if source.is_web_page(_ANSWER_S):
                message = f"{url} is a web page, such as a list of files, and no data set"
                yield Finding(field, message, "Name a file of it, or an archive")
        return
    if not source.exists():
        fix = f"Give the path of a folder or file, or a URL{_on_the_hub(url, field, base)}"
        yield Finding(field, f"there is nothing at {url}", fix)
        return
    try:
        if not any(item.size for item in source.items()):
            yield Finding(field, f"{url} is empty", "Give a folder with files that are not empty")
    except OddFileError as error:
        fix = "Take it out of there: files, folders, and links to them can be copied"
        yield Finding(field, f"in {url}, {error}", fix)
    except OSError as error:
        yield _unreadable(field, error)


def _on_the_hub(path: str, field: str, base: Path) -> str:
    """Suggest the URL of Hugging Face's Hub for a path that looks like a name there; empty: it does not."""
    name = Path(path).relative_to(base).as_posix() if Path(path).is_relative_to(base) else ""
    if not _HUB_NAME.fullmatch(name):
        return ""
    kind, prefix = ("data set", "datasets/") if field == "run.data" else ("model", "")
    return f"; a {kind} of the Hub is hf://{prefix}{name}"


def _unreadable(field: str, error: Exception, url: str | None = None) -> Finding:
    reason = without(str(error) or type(error).__name__, url)
    return Finding(field, f"not all of it can be read: {reason}", "See that it can, from here")


def _squad(ctx: RunContext) -> Findings:
    data = ctx.run.data
    if ctx.run.program != "question_answering" or data is None or not Path(data).exists():
        return
    problems = squad.problems(Path(data))
    if problems:
        yield Finding("run.data", problems[0], "Give files in SQuAD v1.1 format")


def _images(ctx: RunContext) -> Findings:
    run = ctx.run
    # The recipe checks these options itself.
    told = any(word.startswith(("--data", "--label")) or word.endswith(".json") for word in run.args)
    if run.program != "image_classification" or told or run.data is None or not Path(run.data).exists():
        return
    try:
        images.read(run.data, images.LABEL_PATTERN)
    except BadInputError as error:
        yield Finding("run.data", error.message, error.fix or "")


def _checkpoint(ctx: RunContext) -> Findings:
    run = ctx.run
    # The recipe also reads the model's name from its environment and from a file of options.
    elsewhere = run.env_from or "MANYCPU_MODEL" in run.env
    in_args = any(word.startswith("--model") or word.endswith(".json") for word in run.args)
    if run.program == "question_answering" and not (run.model or elsewhere or in_args):
        fix = "Name a folder or a model there, or give --model_name_or_path in run.args"
        yield Finding("run.model", "there is no base checkpoint", fix)


def _output(ctx: RunContext) -> Findings:
    if ctx.output_in_cluster:  # `stage` checks it from inside the cluster
        return
    try:
        yield from _present_output(ctx, ctx.output)
    except BadInputError as error:
        yield Finding("run.output", error.message, error.fix or "")
    except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
        yield _unreadable("run.output", error, ctx.destination)


def _own_folders(ctx: RunContext) -> Findings:
    """Find an output or checkpoints in a folder where manycpu deletes files."""
    home = ctx.driver.home(ctx)
    if home is None:
        return
    home = home.resolve()
    with suppress(BadInputError):  # another check reports it
        for field, path in (("output", ctx.output.local), ("checkpoints", ctx.run.checkpoints)):
            place = path and Path(path).resolve()
            if place and (place == home or any(place.is_relative_to(home / name) for name in OWN_FOLDERS)):
                message = f"{path} is where manycpu keeps its own, and deletes it"
                yield Finding(f"run.{field}", message, "Give a folder elsewhere")


def _output_in_data(ctx: RunContext) -> Findings:
    """Check that the output is not in the data or the base model: the next run would stage its files."""
    with suppress(BadInputError):  # reported by another check
        output = ctx.output.local
        for field in ("data", "model"):
            source = getattr(ctx.run, field)
            if source is None or output is None or not Path(source).is_dir():
                continue
            if output.resolve().is_relative_to(Path(source).resolve()):
                message = f"{output} is in run.{field}, {source}: the next run would stage its files"
                yield Finding("run.output", message, f"Give a folder outside of run.{field}")


def _writable(ctx: RunContext) -> Findings:
    """Check that the output can be written, by making the folders of an export for a moment."""
    useless = next((name for name in protocols(ctx.destination) if name in _NO_OUTPUT), None)
    if useless is not None:
        message = _NO_OUTPUT[useless].format(useless)
        yield Finding("run.output", message, "Give a folder, or a URL of storage, such as s3://bucket/folder")
        return
    if ctx.output_in_cluster:
        return
    try:
        folder = ctx.output.local
        if folder is not None and folder.name and not folder.is_file():
            _try_out(folder.resolve(), ctx.key)
    except BadInputError:
        return  # another check reports it
    except OSError as error:
        fix = "Give a folder that can be made and written to"
        yield Finding("run.output", f"{ctx.destination} cannot be written: {error.strerror}", fix)


def _try_out(output: Path, key: str) -> None:
    """Make and delete the folders of an export.

    Raises:
        OSError: They cannot be made.
    """
    # A partial export is a folder beside the output; its name is the longest of all.
    token = "0" * (transfer.DIGITS + 9)
    disk.try_out(output.with_name(f".{output.name}.{key}.{token}.partial"))


def _checkpoints(ctx: RunContext) -> Findings:
    folder = ctx.run.checkpoints
    if folder is not None and is_remote(folder):
        fix = "Give a folder that the nodes have, such as one of a shared disk"
        yield Finding("run.checkpoints", f"{folder} is a URL, and a program writes to a folder there", fix)


def _placeholders(ctx: RunContext) -> Findings:
    """Find placeholders in ``run.args`` whose field is not set."""
    if ctx.run.output is None and any("{output}" in argument for argument in ctx.run.args):
        message = "{output} is in them, and run.output is null: nothing that is written there is kept"
        yield Finding("run.args", message, "Give a folder in run.output to have it", fatal=False)
    for word in _words_in_braces(ctx):
        if word in ("data", "model") and getattr(ctx.run, word) is None:
            message = f"{{{word}}} is in them, and there is no run.{word}"
            yield Finding("run.args", message, f"Give run.{word}, which it stands for")


def _misspelt(ctx: RunContext) -> Findings:
    """Find misspelt placeholders in ``run.args``; other words in braces belong to the program, as in JSON."""
    for word in _words_in_braces(ctx):
        near = difflib.get_close_matches(word.strip().lower(), PLACEHOLDERS, 1, cutoff=_LIKE)
        if near and word != near[0] and word not in _WORDS_LIKE_PLACEHOLDERS:
            message = f"{{{word}}} is in them, and is no placeholder"
            yield Finding("run.args", message, f"Did you mean {{{near[0]}}}?")


def _words_in_braces(ctx: RunContext) -> Iterable[str]:
    return dict.fromkeys(word for argument in ctx.run.args for word in _IN_BRACES.findall(argument))


def _tracking(ctx: RunContext) -> Findings:
    yield from trackers.findings(ctx)


def _present_output(ctx: RunContext, output: Location) -> Findings:
    if output.is_file():
        yield Finding("run.output", f"{ctx.destination} is a file", "Give a folder, or a URL of one")
    elif output.local:
        # An export to disk is complete or absent, so all other files are strangers.
        strangers = transfer.strangers(output, ctx.key)[:1]
        yield from (not_empty(ctx, name, output.read_text(REPORT)) for name in strangers)
    elif output.exists():
        finding = occupied(ctx, [item.path for item in output.items()], output.read_text(REPORT))
        yield from [finding] if finding else []


_CHECKS: tuple[Callable[[RunContext], Findings], ...] = (
    _launch_kind,
    _device,
    _program,
    _python,
    _code,
    _started_processes,
    _imports,
    _hogwild,
    _data,
    _hub,
    _squad,
    _images,
    _checkpoint,
    _output,
    _own_folders,
    _output_in_data,
    _kept_nowhere,
    _writable,
    _checkpoints,
    _placeholders,
    _misspelt,
    _tracking,
)
