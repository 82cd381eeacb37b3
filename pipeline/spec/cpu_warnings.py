"""The mistakes that people make with the cores and the memory of a node, each with what to do instead."""

from collections.abc import Iterator, Sequence
from typing import Final

from manycpu.pipeline.spec import quantity
from manycpu.pipeline.spec.cpu_request import AFFINITY_VARIABLES, THREAD_VARIABLES, Sizes, Wanted
from manycpu.pipeline.spec.hardware import bf16_warning
from manycpu.pipeline.spec.machine import Machine

__all__ = ["found"]

_CONTAINERS_SHM: Final = 64 << 20  # what container runtimes give by themselves


def found(machine: Machine, wanted: Wanted, sizes: Sizes, preload: Sequence[str]) -> Iterator[str]:
    """Find them.

    Args:
        machine: What the node grants.
        wanted: What the run wants of it.
        sizes: How the node is divided.
        preload: What would be preloaded if the user had set nothing.
    """
    yield from _more_than_there_is(machine, wanted)
    yield from _shape(machine, sizes)
    yield from _threads(wanted, sizes)
    yield from _affinity(wanted, sizes)
    yield from _preload(wanted, preload)
    yield from _workers(wanted)
    if wanted.dtype == "bf16" and (warning := bf16_warning(machine.flags)):
        yield warning


def _more_than_there_is(machine: Machine, wanted: Wanted) -> Iterator[str]:
    if wanted.cpus and wanted.cpus > machine.processors:
        yield (
            f"run.resources.cpu asks for {wanted.cpus:g} cores; this node grants {machine.processors:g}, "
            "which are used"
        )
    if wanted.memory and machine.memory and wanted.memory > machine.memory:
        yield (
            f"run.resources.memory is {quantity.shown(wanted.memory)}, more than this node can allocate: "
            f"{quantity.shown(machine.memory)}"
        )
    if machine.guaranteed is False:
        yield (
            "limits are not requests: what the pod requests of processors is not its limit of "
            f"{machine.quota:g}, so that a busy node gives it less than is planned for; make them equal"
        )


def _shape(machine: Machine, sizes: Sizes) -> Iterator[str]:
    if sizes.processes > sizes.cores:
        yield f"{sizes.processes} processes share {quantity.counted(sizes.cores, 'core')}: oversubscribed"
    per_socket = len({cpu.core for cpu in machine.cpus}) / machine.sockets
    if sizes.fair > per_socket:
        yield (
            f"a process of {sizes.fair} threads spans {machine.sockets} sockets, and reads a part of its "
            f"memory across the link between them; set run.nproc_per_node to {machine.sockets}, or a multiple"
        )
    if machine.shm is not None and machine.shm <= _CONTAINERS_SHM and sizes.processes > 1:
        yield (
            f"the shared memory at /dev/shm has {quantity.shown(machine.shm)}, as in any container: "
            "ranks and data loaders that exchange tensors there die of SIGBUS; mount a memory-backed volume "
            "there, or run the container with --shm-size"
        )


def _threads(wanted: Wanted, sizes: Sizes) -> Iterator[str]:
    processes = quantity.counted(sizes.processes, "process", "es")
    where = f"{processes} on {quantity.counted(sizes.cores, 'core')}"
    for name in THREAD_VARIABLES:
        text = wanted.env.get(name, "").strip()
        if not text or text == str(sizes.fair):
            continue
        count = int(text) if text.isdecimal() else 0
        if count * sizes.processes > max(sizes.cores, sizes.processes):
            yield (
                f"run.env: {name}={text} makes {count * sizes.processes} threads of {where}: oversubscribed; "
                f"leave it out to have the CPU plan's {sizes.fair}"
            )
        else:
            yield (
                f"run.env: {name}={text} wins over the CPU plan's {sizes.fair} ({where}); "
                "leave it out to have the plan's"
            )


def _affinity(wanted: Wanted, sizes: Sizes) -> Iterator[str]:
    for name in AFFINITY_VARIABLES:
        if name in wanted.env and sizes.processes > 1:
            yield (
                f"run.env: {name}={wanted.env[name]} wins over the CPU plan's pinning, and is the same for "
                f"all {sizes.processes} ranks of a node; leave it out to give each rank cores of its own"
            )


def _preload(wanted: Wanted, preload: Sequence[str]) -> Iterator[str]:
    given = wanted.env.get("LD_PRELOAD")
    missing = [path for path in preload if given is not None and path not in given]
    if missing:
        yield f"run.env: LD_PRELOAD={given} wins over the CPU plan's, without {', '.join(missing)}"


def _workers(wanted: Wanted) -> Iterator[str]:
    if wanted.backend in ("gloo", "mpi") or wanted.env.get("CCL_WORKER_OFFLOAD", "0") != "0":
        return
    for name in ("CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"):
        if wanted.env.get(name, "1") != "1":
            yield (
                f"run.env: {name}={wanted.env[name]} has no effect: the backend ccl drives oneCCL without "
                "workers (CCL_WORKER_OFFLOAD=0)"
            )
