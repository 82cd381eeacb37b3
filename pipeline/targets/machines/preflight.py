"""preflight on machines: check a run against this machine or the hosts of a hostfile."""

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from manycpu.pipeline.adapters import disk, hosts, lock, mpi
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec import memory_estimate
from manycpu.pipeline.spec.errors import BadInputError, Finding, LaunchError, install
from manycpu.pipeline.spec.machine import Machine, has_bf16
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.targets.machines.context import MachineContext, directory_of, home_of
from manycpu.pipeline.targets.machines.launch import objects


def findings(ctx: MachineContext) -> Iterator[Finding]:
    """Run all checks of a run against its machines, and yield their findings."""
    if isinstance(ctx.target, Local):
        yield from _check_scale(ctx)
        yield from _check_memory(ctx)
        yield from _check_environment(ctx)
    yield from _check_mpirun(ctx)
    resume = ctx.run.resume_from
    # Where there are other hosts, the checkpoint is on them.
    if resume is not None and isinstance(ctx.target, Local) and not Path(resume).is_dir():
        yield Finding("run.resume_from", f"there is no folder {resume}", "Give a checkpoint's folder")
    folder = directory_of(ctx)
    try:
        disk.try_out(folder)
        # The trial leaves no folder behind, so that locks are tried in the nearest folder that exists.
        lock.try_out(next(parent for parent in folder.parents if parent.exists()))
    except BadInputError as error:
        yield Finding.of(error, "target.directory")
        return
    except OSError as error:
        fix = "Set target.directory, or $MANYCPU_HOME, to a folder that can be made and written to"
        yield Finding("target.directory", f"{home_of(ctx)} cannot be written: {error.strerror}", fix)
        return
    yield from _check_disk(ctx)


def _check_scale(ctx: MachineContext) -> Iterator[Finding]:
    """Compare the nodes, processes and cores that the run asks for with this machine."""
    if ctx.run.nodes != (1, 1):
        yield Finding(
            "run.nnodes",
            f"{ctx.run.nnodes} nodes were asked for, and the target local is one machine",
            "Set run.nnodes to 1 and run.nproc_per_node higher, or take the target baremetal",
        )
    cores = Machine.observe().processors
    if ctx.run.processes > cores and not ctx.run.oversubscribe:
        yield Finding(
            "run.nproc_per_node",
            f"{ctx.run.processes} processes were asked for, and this machine grants {cores:g} cores",
            f"Set it to {max(1, int(cores))} or less, or set run.oversubscribe to true",
        )
    if ctx.run.resources.cpu is not None and ctx.run.resources.cpu > cores:
        yield Finding(
            "run.resources.cpu",
            f"{ctx.run.resources.cpu:g} cores were asked for, and this machine grants {cores:g}",
            "Ask for less, or leave it out to have all of them",
        )


def _check_memory(ctx: MachineContext) -> Iterator[Finding]:
    """Compare the estimated memory of a recipe's ranks with this machine's memory, if both are known."""
    machine = Machine.observe()
    estimated = memory_estimate.estimate(ctx.run, ctx.base, has_bf16=has_bf16(machine.flags))
    if machine.memory and not isinstance(estimated, str):  # a text: why there is no estimate
        yield from memory_estimate.findings(estimated, machine.memory, "target.kind", "this machine")


def _check_environment(ctx: MachineContext) -> Iterator[Finding]:
    """Check for missing packages on this machine; ranks on hosts report them seconds after the launch."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("target.kind", "this environment has no torch", install("train"))
    if ctx.run.device == "xla" and importlib.util.find_spec("torch_xla") is None:
        fix = "Use an environment of requirements/xla-torch.txt and requirements/xla.txt: docs/xla.md"
        yield Finding("run.device", "'xla' was asked for, and this environment has no torch_xla", fix)
    if ctx.run.backend != "ccl":
        return
    names = ("oneccl-devel", "oneccl-bind-pt", "torch-ccl")  # any of them is enough
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        yield Finding("run.backend", "oneCCL exists for Linux on x86_64 alone", "Set run.backend to 'gloo'")
    elif not any(package for name in names for package in importlib.metadata.distributions(name=name)):
        yield Finding(
            "run.backend",
            "'ccl' was asked for, and this environment has no oneCCL",
            "Install it: pip install 'manycpu[ccl]', or set run.backend to 'gloo'",
        )


def _check_mpirun(ctx: MachineContext) -> Iterator[Finding]:
    """Check the MPI of this machine, every host, and the command for mpirun, if that is the launch kind."""
    if ctx.target.launch != "mpirun":
        return
    try:
        mpi_here = mpi.find(ctx.target.mpi)
        found: list[Finding] = []
        if isinstance(ctx.target, BareMetal):
            # Without `has_bf16`: it is not known of the hosts.
            estimated = memory_estimate.estimate(ctx.run, ctx.base)
            found = hosts.check(ctx.target, ctx.run, mpi_here, ctx.needs, estimated)
        yield from found
        if not any(finding.fatal for finding in found):
            # Builds the command only for its errors. On hosts, it asks the first one once more.
            objects(ctx)
    except (BadInputError, LaunchError) as error:
        yield Finding(error.field or "target.mpi", error.message, error.fix or "Install Intel MPI: impi-rt")


def _check_disk(ctx: MachineContext) -> Iterator[Finding]:
    """Compare the size of data and base model on this machine with the free disk space for their copies."""
    if ctx.target.stage == "in_place":
        return
    local = [path for path in (ctx.run.data, ctx.run.model) if path and Path(path).exists()]
    try:
        # "run.data", also for the model: the field is only for errors of URLs, and these are paths.
        needed = sum(item.size for path in local for item in Location.of(path, "run.data").items())
    except OSError:  # the check of the data reports it
        return
    # The target's folder may not exist yet: ask for the disk of the nearest folder that does.
    folder = next(path for path in [home_of(ctx), *home_of(ctx).parents] if path.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        yield Finding(
            "target.directory",
            f"{home_of(ctx)} has {free >> 20} MiB free, and the data and the model take {needed >> 20} MiB",
            "Make room, run `manycpu clean`, or set target.directory to another disk",
        )
