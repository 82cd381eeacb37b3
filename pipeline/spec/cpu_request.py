"""What a run asks of each node's CPUs, the input of the CPU plan; and warnings about mistakes in it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from manycpu.pipeline.spec.machine import Machine, bf16_warning
from manycpu.pipeline.spec.words import counted, format_bytes

__all__ = ["AFFINITY_VARIABLES", "THREAD_VARIABLES", "CpuRequest", "Sizes", "cpu_warnings"]

# What OpenMP, MKL, OpenBLAS, numexpr and Rayon (tokenizers) read to size their thread pools.
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)

# What OpenMP (GNU's and Intel's) and Intel MPI read to bind threads and ranks to processors.
AFFINITY_VARIABLES: Final = (
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "I_MPI_PIN",
    "I_MPI_PIN_DOMAIN",
    "I_MPI_PIN_PROCESSOR_LIST",
)


@dataclass(frozen=True, kw_only=True)
class CpuRequest:
    """Processes, CPUs and memory that a run asks of each node; None: no preference."""

    processes: int | None = None
    """Training processes on the node (``run.nproc_per_node``); None: one for each socket."""
    subprocesses: int = 1
    """Processes that compute for each of them at a time (``run.subprocesses``)."""
    cpus: float | None = None
    """Processors that the run may use (``run.resources.cpu``); None: all that are granted."""
    memory: int | None = None
    """Bytes that the run may use (``run.resources.memory``)."""
    dtype: str = "fp32"
    backend: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables of ``run.env``, which win over the plan, with a warning if it matters."""

    @property
    def threads(self) -> int | None:
        """The user's OMP_NUM_THREADS, of a list for nested regions the first; None: it is no count."""
        text = self.env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return int(text) if text.isdecimal() and int(text) > 0 else None


class Sizes(NamedTuple):
    """How a node's cores are divided among its processes."""

    cores: float
    processes: int
    subprocesses: int
    """Of each process; 1: it computes itself."""
    fair: int
    """Threads of each subprocess that the cores allow."""
    threads: int
    """Threads of each subprocess, as they will be."""

    @property
    def computing(self) -> int:
        """How many processes compute at a time."""
        return self.processes * self.subprocesses

    @property
    def cores_each(self) -> int:
        """Whole cores of a process, and of all its subprocesses together."""
        return max(1, math.floor(self.cores / self.processes))

    def __str__(self) -> str:
        processes = counted(self.processes, "process", "es")
        return processes if self.subprocesses == 1 else f"{processes} x {self.subprocesses} subprocesses"


_CONTAINER_SHM: Final = 64 << 20  # the default of container runtimes


def cpu_warnings(
    machine: Machine, request: CpuRequest, sizes: Sizes, preload: Sequence[str]
) -> Iterator[str]:
    """Yield a warning for each common mistake with the cores and the memory of a node, with what to do.

    Args:
        machine: What the node grants.
        request: What the run asks of it.
        sizes: How the node's cores are divided.
        preload: The libraries that would be preloaded if the user had set none.
    """
    yield from _excess(machine, request)
    yield from _shape(machine, sizes)
    yield from _threads(request, sizes)
    for name in AFFINITY_VARIABLES:
        if name in request.env and sizes.processes > 1:
            yield (
                f"run.env: {name}={request.env[name]} wins over the CPU plan's pinning, and is the same for "
                f"all {sizes.processes} ranks of a node; leave it out to give each rank cores of its own"
            )
    preloaded = request.env.get("LD_PRELOAD")
    if missing := [path for path in preload if preloaded is not None and path not in preloaded]:
        yield f"run.env: LD_PRELOAD={preloaded} wins over the CPU plan's, without {', '.join(missing)}"
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
            f"run.resources.memory is {format_bytes(request.memory)}, more than this node can allocate: "
            f"{format_bytes(machine.memory)}"
        )
    if machine.guaranteed is False:
        yield (
            "limits are not requests: what the pod requests of processors is not its limit of "
            f"{machine.quota:g}, so that a busy node gives it less than is planned for; make them equal"
        )


def _shape(machine: Machine, sizes: Sizes) -> Iterator[str]:
    if sizes.computing > sizes.cores:
        share = "share" if sizes.computing > 1 else "shares"
        yield f"{sizes} {share} {counted(sizes.cores, 'core')}: oversubscribed"
    per_socket = len({cpu.core for cpu in machine.cpus}) / machine.sockets
    if sizes.fair > per_socket:
        yield (
            f"a process of {sizes.fair} threads spans {machine.sockets} sockets, and reads a part of its "
            f"memory across the link between them; set run.nproc_per_node to {machine.sockets}, or a multiple"
        )
    if machine.shm is not None and machine.shm <= _CONTAINER_SHM and sizes.processes > 1:
        yield (
            f"the shared memory at /dev/shm has {format_bytes(machine.shm)}, as in any container: "
            "ranks and data loaders that exchange tensors there die of SIGBUS; mount a memory-backed volume "
            "there, or run the container with --shm-size"
        )


def _threads(request: CpuRequest, sizes: Sizes) -> Iterator[str]:
    scale = f"{sizes} on {counted(sizes.cores, 'core')}"
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


def _workers(request: CpuRequest) -> Iterator[str]:
    if request.backend in ("gloo", "mpi") or request.env.get("CCL_WORKER_OFFLOAD", "0") != "0":
        return
    for name in ("CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"):
        if request.env.get(name, "1") != "1":
            yield (
                f"run.env: {name}={request.env[name]} has no effect: the backend ccl drives oneCCL without "
                "workers (CCL_WORKER_OFFLOAD=0)"
            )
