"""Warnings about common mistakes with the cores and the memory of a node, each with what to do instead."""

from collections.abc import Iterator, Sequence
from typing import Final

from manycpu.pipeline.spec import quantity
from manycpu.pipeline.spec.cpu_request import AFFINITY_VARIABLES, THREAD_VARIABLES, CpuRequest, Sizes
from manycpu.pipeline.spec.hardware import bf16_warning
from manycpu.pipeline.spec.machine import Machine

__all__ = ["warnings"]

_CONTAINERS_SHM: Final = 64 << 20  # what container runtimes give by themselves


def warnings(machine: Machine, request: CpuRequest, sizes: Sizes, preload: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each mistake in what a run asks of a node.

    Args:
        machine: What the node grants.
        request: What the run wants of it.
        sizes: How the node is divided.
        preload: What would be preloaded if the user had set nothing.
    """
    yield from _excess(machine, request)
    yield from _shape(machine, sizes)
    yield from _threads(request, sizes)
    yield from _affinity(request, sizes)
    yield from _preload(request, preload)
    yield from _workers(request)
    if request.dtype == "bf16" and (warning := bf16_warning(machine.flags)):
        yield warning


def _excess(machine: Machine, request: CpuRequest) -> Iterator[str]:
    if request.cpus and request.cpus > machine.processors:
        yield (
            f"run.resources.cpu asks for {request.cpus:g} cores; this node grants {machine.processors:g}, "
            "which are used"
        )
    if request.memory and machine.memory and request.memory > machine.memory:
        yield (
            f"run.resources.memory is {quantity.shown(request.memory)}, more than this node can allocate: "
            f"{quantity.shown(machine.memory)}"
        )
    if machine.guaranteed is False:
        yield (
            "limits are not requests: what the pod requests of processors is not its limit of "
            f"{machine.quota:g}, so that a busy node gives it less than is planned for; make them equal"
        )


def _shape(machine: Machine, sizes: Sizes) -> Iterator[str]:
    if sizes.computing > sizes.cores:
        share = "share" if sizes.computing > 1 else "shares"
        yield f"{sizes} {share} {quantity.counted(sizes.cores, 'core')}: oversubscribed"
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


def _threads(request: CpuRequest, sizes: Sizes) -> Iterator[str]:
    scale = f"{sizes} on {quantity.counted(sizes.cores, 'core')}"
    for name in THREAD_VARIABLES:
        text = request.env.get(name, "").strip()
        if not text or text == str(sizes.fair):
            continue
        count = int(text) if text.isdecimal() else 0
        if count * sizes.computing > max(sizes.cores, sizes.computing):
            yield (
                f"run.env: {name}={text} makes {count * sizes.computing} threads of {scale}: oversubscribed; "
                f"leave it out to have the CPU plan's {sizes.fair}"
            )
        else:
            yield (
                f"run.env: {name}={text} wins over the CPU plan's {sizes.fair} ({scale}); "
                "leave it out to have the plan's"
            )


def _affinity(request: CpuRequest, sizes: Sizes) -> Iterator[str]:
    for name in AFFINITY_VARIABLES:
        if name in request.env and sizes.processes > 1:
            yield (
                f"run.env: {name}={request.env[name]} wins over the CPU plan's pinning, and is the same for "
                f"all {sizes.processes} ranks of a node; leave it out to give each rank cores of its own"
            )


def _preload(request: CpuRequest, preload: Sequence[str]) -> Iterator[str]:
    value = request.env.get("LD_PRELOAD")
    missing = [path for path in preload if value is not None and path not in value]
    if missing:
        yield f"run.env: LD_PRELOAD={value} wins over the CPU plan's, without {', '.join(missing)}"


def _workers(request: CpuRequest) -> Iterator[str]:
    if request.backend in ("gloo", "mpi") or request.env.get("CCL_WORKER_OFFLOAD", "0") != "0":
        return
    for name in ("CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"):
        if request.env.get(name, "1") != "1":
            yield (
                f"run.env: {name}={request.env[name]} has no effect: the backend ccl drives oneCCL without "
                "workers (CCL_WORKER_OFFLOAD=0)"
            )
