"""preflight: every check of a run against its target; each finding names its field and what to do."""

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from manycpu.pipeline import report
from manycpu.pipeline.adapters import hosts, mpi
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.launchers import refusals
from manycpu.pipeline.spec import program, squad
from manycpu.pipeline.spec.errors import BadInputError, Finding, LaunchError
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.verbs.build import module_root
from manycpu.pipeline.verbs.context import RunContext

__all__ = ["preflight"]

Findings = Iterator[Finding]


def preflight(ctx: RunContext) -> list[Finding]:
    """Check everything that can be known before anything starts; the fatal findings come first."""
    found = [finding for check in _CHECKS for finding in check(ctx)]
    return sorted(found, key=lambda finding: not finding.fatal)


def _launch_kind(ctx: RunContext) -> Findings:
    yield from refusals(ctx.run, ctx.target)


def _program(ctx: RunContext) -> Findings:
    kind, name = program.parse(ctx.run.program)
    if kind == "script" and not Path(name).is_file():
        yield Finding(
            "run.program",
            f"there is no script {name}, and no recipe of that name",
            f"Give a script's path, `-m module`, or a recipe: {', '.join(program.RECIPES)}",
        )
    if kind == "module" and module_root(name, ctx.base) is None and not _installed(name):
        yield Finding(
            "run.program",
            f"there is no module {name!r} in {ctx.base}, and none is installed",
            "Put it beside the run file, or install it into this environment",
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.split(".", 1)[0]) is not None
    except ValueError:
        return False


def _data(ctx: RunContext) -> Findings:
    yield from _source(ctx.run.data, "run.data")
    yield from _source(ctx.run.model, "run.model")


def _source(url: str | None, field: str) -> Findings:
    if url is None:
        return
    try:
        source = Location.of(url, field)
    except BadInputError as error:
        yield Finding(field, error.message, error.fix or "")
        return
    if source.local is None:  # what is remote is looked at when it is staged
        return
    if not source.exists():
        yield Finding(field, f"there is nothing at {url}", "Give the path of a folder or file, or a URL")
    elif not any(item.size for item in source.items()):
        yield Finding(field, f"{url} is empty", "Give a folder with files that are not empty")


def _squad(ctx: RunContext) -> Findings:
    data = ctx.run.data
    if ctx.run.program != "question_answering" or data is None or not Path(data).exists():
        return
    problems = squad.problems(Path(data))
    if problems:
        yield Finding("run.data", problems[0], "Give files in SQuAD v1.1 format")


def _output(ctx: RunContext) -> Findings:
    try:
        output = ctx.output
        items = output.items() if output.exists() else []
    except BadInputError as error:
        yield Finding("run.output", error.message, error.fix or "")
        return
    if output.is_file():
        yield Finding("run.output", f"{ctx.run.output} is a file", "Give a folder, or a URL of one")
        return
    before = report.read(output) if items else None
    mine = before is not None and before.key == ctx.key
    only_a_failure = before is not None and before.state is not RunState.SUCCEEDED and len(items) == 1
    if items and not mine and not only_a_failure:
        yield Finding(
            "run.output",
            f"{ctx.run.output} is not empty: {items[0].path} is in it",
            "Give an empty or new folder; a run never overwrites what it did not make",
        )


def _scale(ctx: RunContext) -> Findings:
    if not isinstance(ctx.target, Local):
        return
    if ctx.run.nodes != (1, 1):
        yield Finding(
            "run.nnodes",
            f"{ctx.run.nnodes} nodes were asked for, and the target local is one machine",
            "Set run.nnodes to 1 and run.nproc_per_node higher, or take the target baremetal",
        )
    cores = Machine.observe().processors
    if ctx.run.nproc_per_node > cores and not ctx.run.oversubscribe:
        yield Finding(
            "run.nproc_per_node",
            f"{ctx.run.nproc_per_node} processes were asked for, and this machine grants {cores:g} cores",
            f"Set it to {max(1, int(cores))} or less, or set run.oversubscribe to true",
        )
    if ctx.run.resources.cpu is not None and ctx.run.resources.cpu > cores:
        yield Finding(
            "run.resources.cpu",
            f"{ctx.run.resources.cpu:g} cores were asked for, and this machine grants {cores:g}",
            "Ask for less, or leave it out to have all of them",
        )


def _torch(ctx: RunContext) -> Findings:
    if isinstance(ctx.target, Local) and importlib.util.find_spec("torch") is None:
        yield Finding(
            "target.kind", "this environment has no torch", "Install it: pip install 'manycpu[train]'"
        )


def _backend(ctx: RunContext) -> Findings:
    """See whether ccl can be had on this machine; on others the node says so, in seconds."""
    if ctx.run.backend != "ccl" or not isinstance(ctx.target, Local):
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        yield Finding("run.backend", "oneCCL exists for Linux on x86_64 alone", "Set run.backend to 'gloo'")
    elif not _has_distribution("oneccl-devel", "oneccl-bind-pt", "torch-ccl"):
        yield Finding(
            "run.backend",
            "'ccl' was asked for, and this environment has no oneCCL",
            "Install it: pip install 'manycpu[ccl]', or set run.backend to 'gloo'",
        )


def _has_distribution(*names: str) -> bool:
    return any(next(iter(importlib.metadata.distributions(name=name)), None) for name in names)


def _mpirun(ctx: RunContext) -> Findings:
    if ctx.target.launch != "mpirun":
        return
    try:
        mpi.find(ctx.target.mpi)
    except (BadInputError, LaunchError) as error:
        yield Finding(error.field or "target.mpi", error.message, error.fix or "Install Intel MPI: impi-rt")


def _hosts(ctx: RunContext) -> Findings:
    if isinstance(ctx.target, BareMetal):
        with suppress(BadInputError, LaunchError):  # that there is no MPI is told by the check before
            yield from hosts.check(ctx.target, ctx.run, mpi.find(ctx.target.mpi))


def _resume(ctx: RunContext) -> Findings:
    resume = ctx.run.resume_from
    if resume is not None and isinstance(ctx.target, Local) and not Path(resume).is_dir():
        yield Finding("run.resume_from", f"there is no folder {resume}", "Give a checkpoint's folder")


def _disk(ctx: RunContext) -> Findings:
    data = [url for url in (ctx.run.data, ctx.run.model) if url and Path(url).exists()]
    needed = sum(item.size for url in data for item in Location.of(url, "run.data").items())
    folder = next(path for path in [ctx.home, *ctx.home.parents] if path.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        yield Finding(
            "target.directory",
            f"{ctx.home} has {free >> 20} MiB free, and the data and the model take {needed >> 20} MiB",
            "Make room, run `manycpu clean`, or set target.directory to another disk",
        )


_CHECKS: tuple[Callable[[RunContext], Findings], ...] = (
    _launch_kind,
    _program,
    _data,
    _squad,
    _output,
    _scale,
    _torch,
    _backend,
    _mpirun,
    _hosts,
    _resume,
    _disk,
)
