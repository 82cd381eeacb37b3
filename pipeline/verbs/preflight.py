"""preflight: check a run against its target; each finding names a field and a fix."""

import ast
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePosixPath

from manycpu.pipeline import recipes, transfer
from manycpu.pipeline.adapters import commands, disk
from manycpu.pipeline.adapters.listing import OddFileError
from manycpu.pipeline.adapters.storage import (
    VERSION,
    Location,
    fault_of,
    fix_of,
    in_bucket,
    is_remote,
    login_of,
    protocols,
)
from manycpu.pipeline.launchers import device_refusals, refusals
from manycpu.pipeline.launchers.environment import PLACEHOLDERS
from manycpu.pipeline.recipes import base_folder
from manycpu.pipeline.recipes.causal_lm.preflight import findings as language_findings
from manycpu.pipeline.recipes.hogwild import files
from manycpu.pipeline.recipes.image_classification import images
from manycpu.pipeline.recipes.question_answering import squad
from manycpu.pipeline.spec import cpu_plan, program, recipe_options
from manycpu.pipeline.spec.credentials import redacted, redacted_options, without_secrets
from manycpu.pipeline.spec.errors import BadInputError, BuildError, Finding, LaunchError
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.output import REPORT
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import did_you_mean, most_like
from manycpu.pipeline.targets.context import OWN_FOLDERS, RunContext
from manycpu.pipeline.targets.output import not_empty_finding, occupied_finding
from manycpu.pipeline.targets.program_code import (
    code_of,
    has_module,
    import_findings,
    installed,
    main_file,
    program_of,
)
from manycpu.pipeline.tracking import trackers
from manycpu.pipeline.verbs.source_checks import process_findings, relative_writes

Findings = Iterator[Finding]
_IN_BRACES = re.compile(r"(?<![{$])\{(\s*\w+\s*)\}(?!\})")
"""Matches {word}, but neither ${word} of a shell nor {{word}} of a template."""
_MIN_RATIO = 0.8  # difflib ratio: `dta` and `ouput` are like a placeholder, and `out` and `step` are not
_WORDS_LIKE_PLACEHOLDERS = frozenset({"date", "mode"})
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FOLDERS = ("datasets/", "spaces/", "buckets/")
# The Hub's client refuses names without an owner, such as gpt2, and misunderstands models/.
_REPOSITORY = re.compile(r"hf://(?!models/)((datasets|spaces|buckets)/)?+[^/]+/[^/]+")
_DATA_OPTIONS = ("dataset_name", "train_file", "validation_file", "test_file", "data_dir")
_WEB_TIMEOUT_S = 5.0  # for a server with a source; staging asks a slower one again
_PARSER_TIMEOUT_S = 60.0  # for a recipe's parser
_NOT_WRITABLE = ["dask", "data", "dvc", "gist", "git", "github", "http", "https", "libarchive", "reference"]
_LOCAL_CACHES = ["blockcache", "cached", "filecache", "simplecache"]
_WHY_NO_OUTPUT = {
    **dict.fromkeys([*_NOT_WRITABLE, "tar", "zip"], "nothing can be written by {}"),
    **dict.fromkeys(_LOCAL_CACHES, "{} reads back a copy of its own, and not what arrived"),
    "hf": "with an export to {}, each file would be a commit",
    "memory": "what is written to {} ends with its process",
}
"""fsspec protocol -> why it cannot hold an output, according to its source."""


def preflight(ctx: RunContext) -> list[Finding]:
    """Run all checks of a run before anything starts; returns the findings, the fatal ones first."""
    findings = [*refusals(ctx.run, ctx.target), *device_refusals(ctx.run, ctx.target)]
    for check in _CHECKS:
        findings += check(ctx)
    findings += [*trackers.findings(ctx), *ctx.driver.findings(ctx)]
    return sorted(findings, key=lambda finding: not finding.fatal)


def _program(ctx: RunContext) -> Findings:
    """Check that the program exists: as a script here, as a module here or installed, or as a recipe."""
    kind, name = program.parse(ctx.run.program)
    if kind == "script" and Path(name).is_dir():
        yield Finding("run.program", f"{name} is a folder", "Give the script in it that trains")
    elif kind == "script" and not Path(name).is_file():
        suggestion = did_you_mean(name.replace("-", "_"), program.RECIPES)
        fix = suggestion or f"Give a script's path, `-m module`, or a recipe: {', '.join(program.RECIPES)}"
        yield Finding("run.program", f"there is no script {name}, and no recipe of that name", fix)
    # An image may have modules that this environment lacks; `_code` looks for a module in run.code.
    missing = kind == "module" and not has_module(ctx.base, name) and not installed(name)
    if missing and ctx.run.code is None and not ctx.target.has_image:
        yield Finding(
            "run.program",
            f"there is no module {name!r} in {ctx.base}, and none is installed",
            "Put it beside the run file, or install it into this environment",
        )


def _main_file(ctx: RunContext) -> Findings:
    """Check the source of the program's main file: syntax, processes, imports, and where it writes."""
    path = main_file(ctx.run, ctx.base)
    if path is None:
        return
    ranks_run_here = ctx.target.is_this_machine  # other nodes may have a newer Python, and other cores
    try:
        source = path.read_bytes()
        # The ranks print the warnings of Python, and may parse what is nested too deeply for ast.
        with warnings.catch_warnings(action="ignore"), suppress(RecursionError, MemoryError):
            ast.parse(source, path.name)
    except OSError as error:
        yield _unreadable("run.program", error)
        return
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        fix = "Mend it, or give another script"
        yield Finding("run.program", f"{path} is no Python: {why}{line}", fix, fatal=ranks_run_here)
    text = source.decode(errors="replace")
    threads = cpu_plan.plan(Machine.observe(), ctx.run.cpu_request).threads if ranks_run_here else None
    yield from process_findings(text, path.name, ctx.run.subprocesses, threads)
    with suppress(BadInputError, BuildError, OSError):  # `_code` reports them
        yield from import_findings(ctx)
    if ctx.run.output is None:
        yield from _lost_write(ctx, text, path.name)


def _lost_write(ctx: RunContext, source: str, name: str) -> Findings:
    """Warn of the first path in its working folder that a program without an output writes to.

    ``source`` and ``name`` are the text and the name of the program's main file.
    """
    write = next(relative_writes(source, ctx.run.args), None)
    if write is not None:
        yield Finding(
            "run.output",
            f"{name} writes to {write.path!r} ({write.where}), in its working folder, which goes "
            "with the run: run.output is null, and nothing is exported",
            "Give run.output, and have the program write to {output}, or $MANYCPU_OUTPUT",
            fatal=False,
        )


def _code(ctx: RunContext) -> Findings:
    """Check that the files of the program's folder can be read, and are not too many or too large."""
    # The calls are made for the errors that they raise. `_program` reports a script that does not exist.
    try:
        root, arguments = program_of(ctx)
        # A module needs no file here, `program_of` checks it.
        if root and root.is_dir() and (arguments[0] == "-m" or (root / arguments[0]).is_file()):
            code_of(ctx, root, arguments)
    except (BadInputError, BuildError) as error:
        yield Finding.of(error, field="run.program")
    except OSError as error:
        yield _unreadable("run.program", error)


def _recipe(ctx: RunContext) -> Findings:
    """Check data and model of a recipe, if they are on this machine, and some options.

    The recipe itself checks the rest.
    """
    run, options = ctx.run, _options(ctx)
    if options is None:
        return
    # Options that name data or a model win over run.data and run.model, which are then not checked.
    data = None if any(map(options.get, _DATA_OPTIONS)) else _path_here(run.data)
    model = None if any(map(options.get, ("model_name_or_path", "model"))) else _path_here(run.model)
    try:
        if run.program == "question_answering":
            yield from _squad(data, options)
        elif run.program == "hogwild":
            yield from _hogwild(run, data, options)
        elif run.program == "causal_lm":
            yield from language_findings(data, model, options)
        else:  # image_classification
            if model and model.is_dir():
                base_folder.check_timm(model)
            _check_images(run, data, options)
    except BadInputError as error:
        yield Finding.of(error, field="run.data")


def _squad(data: Path | None, options: recipe_options.Options) -> Findings:
    """Check that ``data`` has the files in SQuAD's format that the options need; None: check nothing."""
    if data is None:
        return
    version_2 = recipe_options.is_on(options, "version_2_with_negative")
    # As the recipe decides: without any of these options, it trains.
    chooses_other = bool({"do_eval", "do_predict"} & options.keys())
    trains = recipe_options.is_on(options, "do_train", default=not chooses_other)
    for problem in squad.problems(data, version_2=version_2, trains=trains)[:1]:  # the first is enough
        yield Finding("run.data", problem, "Give files in SQuAD's format")


def _hogwild(run: TrainingRun, data: Path | None, options: recipe_options.Options) -> Findings:
    """Check that ``--mode shared``, the default, has one rank, and that MNIST's files are in ``data``.

    Raises:
        BadInputError: A file is missing.
    """
    averaged = recipe_options.value_of(options, "mode") == "averaged"
    if not averaged and (run.nproc_per_node > 1 or run.nodes.most > 1):
        fix = "Add --mode averaged to run.args, or set run.nnodes and run.nproc_per_node to 1"
        ranks = f"{run.nnodes} node(s) with {run.nproc_per_node} process(es) each"
        message = f"--mode shared has one model in one rank's memory, and there are {ranks}"
        yield Finding("run.args", message, fix)
    if data:
        files.find(data)  # for its error


def _check_images(run: TrainingRun, data: Path | None, options: recipe_options.Options) -> None:
    """Raise BadInputError if there are no images, or fewer than one batch for each rank.

    ``data``: the folder of images; None: there is none on this machine. That is an error only if nothing in
    the run can name images elsewhere.
    """
    is_named = run.data or run.env_from or "MANYCPU_DATA" in run.env or any(map(options.get, _DATA_OPTIONS))
    if data or not is_named:
        pattern = recipe_options.value_of(options, "label_pattern") or images.LABEL_PATTERN
        images_found = images.read(data, pattern)  # of None, it raises that there are no images
        batch = recipe_options.value_of(options, "batch_size") or str(images.BATCH_SIZE)
        if batch.isdecimal():  # else the recipe itself refuses it
            count = images.train_count(len(images_found.files))
            # An elastic run is judged by its least number of ranks.
            images.check_sizes(count, int(batch), run.nodes.least * run.processes)


def _path_here(url: str | None) -> Path | None:
    """Return the path of data or a model on this machine; None: ``url`` is None, elsewhere, or missing."""
    with suppress(BadInputError):  # `_data` reports it
        path = Location.of(url, field="run.data").local if url else None
        return path if path and path.exists() else None
    return None


def _options(ctx: RunContext) -> recipe_options.Options | None:
    """Read a recipe's options; None: the program is no recipe, or its file of options cannot be read here."""
    if ctx.run.program not in program.RECIPES:
        return None
    try:
        return recipe_options.read(ctx.run.args)
    except BadInputError:  # a file that the nodes may have
        return None


def _recipe_arguments(ctx: RunContext) -> Findings:
    """Let a recipe check its own options and base checkpoint, in another process, because it imports torch.

    Nothing is done if the ranks run on this machine: they make the same check, and start as soon as that
    process would.
    """
    run, recipe = ctx.run, program.parse(ctx.run.program)
    if not run.args or _options(ctx) is None or ctx.target.is_this_machine:
        return
    model = str(_path_here(run.model) or run.model or "")
    # Nothing is trained: any name will do for the output.
    env = {"MANYCPU_OUTPUT": "output", "MANYCPU_DTYPE": run.dtype or "auto", "MANYCPU_MODEL": model}
    with suppress(LaunchError):  # on a busy machine, the process may take too long
        question = json.dumps({"recipe": recipe.name, "argv": run.args, "env": env}).encode()
        command = [sys.executable, "-P", "-m", recipes.__name__]
        process_result = commands.run(command, timeout=_PARSER_TIMEOUT_S, input=question)
        if process_result.code == 0:  # else this machine lacks packages of the recipe
            # The last line: libraries may have printed others before it.
            yield from (Finding(**fields) for fields in json.loads(process_result.out.splitlines()[-1]))


def _recipe_sources(ctx: RunContext) -> Findings:
    """Check that a recipe on transformers has data and a base checkpoint, with all files of the latter.

    Nothing is checked if they may be named where this machine cannot look: in a file of options that only the
    nodes have, or in a Secret of run.env_from.
    """
    run, options = ctx.run, _options(ctx)
    if run.program not in ("question_answering", "causal_lm") or options is None or run.env_from:
        return
    if not run.data and "MANYCPU_DATA" not in run.env and not any(map(options.get, _DATA_OPTIONS)):
        fix = "Name a folder or a file there, or give --dataset_name or --train_file in run.args"
        yield Finding("run.data", "there is no data set", fix)
    if "MANYCPU_MODEL" in run.env or "model_name_or_path" in options:
        return
    if not run.model:
        fix = "Name a folder or a model there, or give --model_name_or_path in run.args"
        yield Finding("run.model", "there is no base checkpoint", fix)
    elif (folder := _path_here(run.model)) and folder.is_dir():
        for fault in base_folder.faults(folder, options):
            yield Finding("run.model", fault, "Give a folder that save_pretrained has written, as a whole")


def _data(ctx: RunContext) -> Findings:
    """Check the sources run.data and run.model; warn if run.data is a model of the Hub."""
    for url, field in ((ctx.run.data, "run.data"), (ctx.run.model, "run.model")):
        if url and url.startswith("hf://") and not _REPOSITORY.match(url):
            yield Finding(field, f"{url} names nothing of the Hub", f"Name {_on_the_hub(field, 'NAME')}")
        elif url and (fault := fault_of(url, field)):
            yield fault
        elif url:
            yield from _source(ctx, url, field)
    shown_data = redacted(ctx.run.data or "")
    protocol, _, name = shown_data.partition("://")
    if protocol == "hf" and not name.startswith(_HUB_FOLDERS):
        message = f"{shown_data} is a model on the Hub, not a data set"
        yield Finding("run.data", message, f"Write a data set as hf://datasets/{name}", fatal=False)


def _on_the_hub(field: str, name: str) -> str:
    """Show how to write the Hub URL of ``name``: of a data set for run.data, else of a model.

    A name without an owner gets the word OWNER.
    """
    kind, prefix = ("data set", "datasets/") if field == "run.data" else ("model", "")
    return f"a {kind} of the Hub as hf://{prefix}{name if '/' in name else f'OWNER/{name}'}"


def _source(ctx: RunContext, url: str, field: str) -> Findings:
    """Check that a source of data or of a model exists, is not empty, and can be copied."""
    by_pods = ctx.target.has_image and is_remote(url)
    try:
        source = Location.of(url, field)
    except BadInputError as error:
        if not by_pods:  # their image may have the packages and settings that this environment lacks
            yield Finding(field, error.message, error.fix or "")
        return
    if source.local is None:
        yield from _remote(source, field, by_pods=by_pods)
        return
    try:
        if not source.exists():
            fix = "Give the path of a folder or file, or a URL"
            # The path is absolute here: take what the user wrote, perhaps a name of the Hub.
            is_below = Path(url).is_relative_to(ctx.base)
            name = Path(url).relative_to(ctx.base).as_posix() if is_below else ""
            if _HUB_NAME.fullmatch(name):
                fix += f", or {_on_the_hub(field, name)}"
            yield Finding(field, f"there is nothing at {url}", fix)
        elif not any(item.size for item in source.items()):
            yield Finding(field, f"{url} is empty", "Give a folder with files that are not empty")
    except OddFileError as error:
        fix = "Take it out of there: files, folders, and links to them can be copied"
        yield Finding(field, f"in {url}, {error}", fix)
    except OSError as error:
        yield _unreadable(field, error)


def _remote(source: Location, field: str, *, by_pods: bool) -> Findings:
    """Check that a source behind a URL exists, can be reached, and is no web page; staging checks the rest.

    With ``by_pods``, pods read the source, and the findings are only warnings: pods have other credentials,
    and may reach other servers. An error of login or connection here need not be an error there.
    """
    where = "from here, " if by_pods else ""
    error = source.fault(_WEB_TIMEOUT_S)
    if isinstance(error, FileNotFoundError):
        fix = "Mend the URL"
        if source.url.startswith("hf://"):
            fix += ", or give the token of a private one, HF_TOKEN"
        reason = without_secrets(str(error), source.url)
        # Some protocols give the path alone as their reason.
        text = source.url if reason in source.url else f"{source.url}: {reason}"
        yield Finding(field, f"{where}there is nothing at {text}", fix, fatal=not by_pods)
        return
    if error is not None and not by_pods:
        yield _unanswered(field, source.url, error)
        return
    with suppress(Exception):  # each fsspec protocol raises its own error types
        if source.is_web_page(_WEB_TIMEOUT_S):
            message = f"{where}{source.url} is a web page, such as a list of files, and no data set"
            yield Finding(field, message, "Name a file of it, or an archive", fatal=not by_pods)


def _unanswered(field: str, url: str, error: Exception) -> Finding:
    """Make a finding of an error of storage behind a URL; a warning, if it has not answered in time."""
    if not isinstance(error, TimeoutError):
        return _unreadable(field, error, url)
    message = f"the storage of {url} has not answered within {_WEB_TIMEOUT_S:g} s"
    return Finding(field, message, "Staging waits longer: see that this machine reaches it", fatal=False)


def _unreadable(field: str, error: Exception, url: str = "") -> Finding:
    """Make a finding of an error of reading; the secrets of ``url`` are hidden in its message."""
    reason = without_secrets(str(error) or type(error).__name__, url)
    fix = fix_of(url, error) or "Let this machine read all of it, or name another"
    return Finding(field, f"it cannot be read: {reason}", fix)


def _output(ctx: RunContext) -> Findings:
    """Check that the output is no file, and has no files that this run did not write.

    A recipe, except hogwild, must have an output.
    """
    if ctx.run.output is None and ctx.run.program in program.RECIPES and ctx.run.program != "hogwild":
        message = f"run.output is null, and {ctx.run.program} writes a model"
        yield Finding("run.output", message, "Give a folder or a URL for it")
    fault = fault_of(ctx.destination, "run.output")
    if fault := fault or _chain_fault(ctx.destination) or _key_fault(ctx.destination):
        yield fault
        return
    if ctx.output_in_cluster:  # `stage` checks it from inside the cluster
        return
    try:
        output = ctx.output
        if output.is_file():
            yield Finding("run.output", f"{ctx.destination} is a file", "Give a folder, or a URL of one")
        elif output.local:
            # An export to disk is complete or absent, so all other files are strangers.
            for name in transfer.strangers(output, ctx.key)[:1]:
                yield not_empty_finding(ctx, name, output.read_text(REPORT))
        else:
            yield from _behind_url(ctx)
    except BadInputError as error:
        yield Finding("run.output", error.message, error.fix or "")
    except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
        yield _unreadable("run.output", error, ctx.destination)


def _chain_fault(url: str) -> Finding | None:
    """Check that each ``dir`` in the chained URL of an output names a folder, as in ``dir://qa::file:///x``.

    Else fsspec takes the path of the storage twice: the model would be at ``/x/x``.
    """
    parts = url.split("::") if is_remote(url) else []
    for part, storage in pairwise(parts):
        if part in ("dir", "dir://"):
            shown = "dir::" if part == "dir" else part
            message = f"{shown} names no folder in {redacted(storage)}"
            return Finding("run.output", message, "Write dir://FOLDER before the colons, or leave them out")
    return None


def _key_fault(url: str) -> Finding | None:
    """Check the path of an output in its bucket (the key); None: it can be used, or there is no bucket.

    The URL must not name a version, and its path must not have ``//``, ``.`` or ``..``.
    """
    if not in_bucket(url):
        return None
    if VERSION in url:
        fix = f"Leave {VERSION} and what follows it out"
        return Finding("run.output", f"{url} names a version, and the model would be written beside it", fix)
    folders = url.partition("://")[2].rstrip("/").split("/")
    if any(folder in ("", ".", "..") for folder in folders):
        return Finding("run.output", f"{url} has '//', '.' or '..' in its path", "Name each folder once")
    return None


def _behind_url(ctx: RunContext) -> Findings:
    """Check an output behind a URL: its bucket must exist, and it must have no files of others."""
    if not ctx.output.exists():
        if ctx.output.in_bucket and (reason := ctx.output.bucket.missing(_WEB_TIMEOUT_S)):
            fix = "Mend the URL, or make the bucket: manycpu makes none"
            yield Finding("run.output", f"the bucket of {ctx.destination} does not exist: {reason}", fix)
        return
    if ctx.ledger.exists() and transfer.has_claimed(ctx.output, ctx.claim_key):
        return  # an export of this run broke off there: the next one compares what it finds
    report = ctx.output.read_text(REPORT)
    if transfer.earlier(ctx.output, ctx.key):  # this export is complete, so all other files are strangers
        for name in transfer.strangers(ctx.output, ctx.key)[:1]:
            yield not_empty_finding(ctx, name, report)
        return
    manycpu_files = transfer.for_people(ctx.output)
    names = [item.path for item in ctx.output.items() if item.path not in manycpu_files]
    if finding := occupied_finding(ctx, names, report):
        yield finding


def _places(ctx: RunContext) -> Findings:
    """Check that output and checkpoints are not in manycpu's own folders, where it deletes files.

    The output must not be in run.data or run.model either: the next run would stage its files.
    """
    home = ctx.driver.home(ctx)
    own_folders = [home.resolve() / name for name in OWN_FOLDERS] if home else []
    with suppress(BadInputError):  # `_output` reports it
        output = ctx.output.local
        for field, path in (("output", output), ("checkpoints", ctx.run.checkpoints)):
            if not path:
                continue
            folder = Path(path).resolve()
            # The folder that contains manycpu's own folders is refused too.
            is_home = folder in {own_folder.parent for own_folder in own_folders}
            if is_home or any(map(folder.is_relative_to, own_folders)):
                message = f"{path} is where manycpu keeps its own, and deletes it"
                yield Finding(f"run.{field}", message, "Give a folder elsewhere")
    for field in ("data", "model"):
        source = getattr(ctx.run, field)
        if source is not None and _is_in(source, ctx.destination):
            message = f"{ctx.destination} is in run.{field}, {source}: the next run would stage its files"
            yield Finding("run.output", message, f"Give a folder outside of run.{field}")


def _is_in(source: str, output: str) -> bool:
    """Whether an output is in a source, or is the source itself; both are paths or URLs."""
    if is_remote(source) or is_remote(output):
        storage, folder = _storage_and_folder(source)
        storage_of_output, folder_of_output = _storage_and_folder(output)
        return storage_of_output == storage and folder_of_output.is_relative_to(folder)
    return Path(source).is_dir() and Path(output).resolve().is_relative_to(Path(source).resolve())


def _storage_and_folder(url: str) -> tuple[tuple[str, str], PurePosixPath]:
    """Split a URL into its storage and the folder there; a login in the URL is left out.

    The storage is the protocol and what follows ``::`` in a chained URL, as in
    ``zip://folder::s3://bucket/file``; empty if the URL is not chained.
    """
    first, _, chained = url.partition("::")
    protocol, _, path = first.rpartition("://")
    storage = ("s3" if protocol == "s3a" else protocol, chained)
    return storage, PurePosixPath(path.removeprefix(f"{login_of(url)}@"))


def _writable(ctx: RunContext) -> Findings:
    """Check that the output can be written, by making the folders of an export for a moment."""
    unfit = next((name for name in protocols(ctx.destination) if name in _WHY_NO_OUTPUT), None)
    if unfit is not None:
        message = _WHY_NO_OUTPUT[unfit].format(unfit)
        yield Finding("run.output", message, "Give a folder, or a URL of storage, such as s3://bucket/folder")
        return
    if ctx.output_in_cluster:
        return
    try:
        folder = ctx.output.local
        if folder is not None and folder.resolve().is_mount():  # an export replaces the folder, in one step
            fix = "Give a folder within it"
            yield Finding("run.output", f"{folder} is a mount point, which cannot be replaced", fix)
        elif folder is not None and folder.name and not folder.is_file():  # `_output` reports a file
            # A partial export is a folder beside the output; its name is the longest of all. The 9: a dot and
            # the 8 digits of the token.
            digest_and_token = "0" * (transfer.DIGITS + 9)
            folder = folder.resolve()
            disk.try_out(folder.with_name(f".{folder.name}.{ctx.key}.{digest_and_token}.partial"))
    except BadInputError:
        return  # `_output` reports it
    except OSError as error:
        fix = "Give a folder that can be made and written to"
        yield Finding("run.output", f"{ctx.destination} cannot be written: {error.strerror}", fix)


def _checkpoints(ctx: RunContext) -> Findings:
    """Check that run.checkpoints is no URL."""
    folder = ctx.run.checkpoints
    if folder is not None and is_remote(folder):
        fix = "Give a folder that the nodes have, such as one of a shared disk"
        yield Finding("run.checkpoints", f"{folder} is a URL, and a program writes to a folder there", fix)


def _logins(ctx: RunContext) -> Findings:
    """Find URLs that name a login of this machine, or contain credentials for S3: pods have neither."""
    for field in ("data", "model", "output"):
        url = getattr(ctx.run, field)
        if not ctx.target.has_image or not url:
            continue
        if login_of(url) or (url.startswith(("s3://", "s3a://")) and redacted(url) != url):
            fix = "Leave it out, and name a Secret with the variables of AWS's clients in run.env_from"
            yield Finding(f"run.{field}", f"{redacted(url)} names a login, and pods have none", fix)


def _placeholders(ctx: RunContext) -> Findings:
    """Find placeholders in ``run.args`` that are misspelt, or whose field is not set.

    Other words in braces belong to the program, as in JSON.
    """
    if ctx.run.output is None and any("{output}" in argument for argument in ctx.run.args):
        message = "{output} is in them, and run.output is null: nothing that is written there is exported"
        yield Finding("run.args", message, "Give a folder in run.output to have it", fatal=False)
    for word in dict.fromkeys(word for argument in ctx.run.args for word in _IN_BRACES.findall(argument)):
        if word in ("data", "model") and getattr(ctx.run, word) is None:
            message = f"{{{word}}} is in them, and there is no run.{word}"
            yield Finding("run.args", message, f"Give run.{word}, which it stands for")
        meant = most_like(word.strip().lower(), PLACEHOLDERS, min_ratio=_MIN_RATIO)
        if meant and word != meant and word not in _WORDS_LIKE_PLACEHOLDERS:
            message = f"{{{word}}} is in them, and is no placeholder"
            yield Finding("run.args", message, f"Did you mean {{{meant}}}?")


def _secret_arguments(ctx: RunContext) -> Findings:
    """Warn of the first secret among the arguments of the program."""
    shown = redacted_options(ctx.run.args)  # word by word, so that the two have the same length
    changed = next((index for index, word in enumerate(shown) if word != ctx.run.args[index]), None)
    if changed is not None:
        # The hidden word with the word before it, which may be the option.
        option = " ".join(shown[max(changed - 1, 0) : changed + 1])
        message = f"{option} is a secret: `ps` shows it, and on Kubernetes the job and its pods do"
        fix = "Have the program read it from a variable: put it into run.env or run.env_from"
        yield Finding("run.args", message, fix, fatal=False)


_CHECKS: tuple[Callable[[RunContext], Iterable[Finding]], ...] = (
    *(_program, _main_file, _code, _recipe, _recipe_arguments, _recipe_sources, _data),
    *(_output, _places, _writable, _checkpoints, _logins, _placeholders, _secret_arguments),
)
