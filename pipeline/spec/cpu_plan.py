"""Plan the processes, threads, cores and memory of a node's training, from what the node grants.

Pure; knows no torch, so that launchers and ``manycpu plan`` use it too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from manycpu.pipeline.spec.machine import Cpu, Machine, bf16_warning
from manycpu.pipeline.spec.words import counted, format_bytes

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
_CONTAINER_SHM: Final = 64 << 20  # the default of container runtimes


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
        """The count in the user's OMP_NUM_THREADS; None: it is not set, or no count.

        Of a list, which has a count for each level of nested regions, the first.
        """
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
    """Threads that each subprocess will have: the user's OMP_NUM_THREADS, or else ``fair``."""

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


class Row(NamedTuple):
    """A line of the plan, as ``manycpu plan`` shows it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """Cores, threads and memory of each process of a node, with the reasons."""

    machine: Machine
    cores: float
    processes: int
    threads: int
    """Threads of each process that computes: the user's number if one was set, else the plan's."""
    pins: tuple[tuple[Cpu, ...], ...] = ()
    """Processors of each process, by its local rank; empty: the kernel decides."""
    preload: tuple[str, ...] = ()
    """Libraries for LD_PRELOAD; empty: the user set it."""
    shm: int | None = None
    """Bytes that /dev/shm should have; None: the memory is unknown."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set before the libraries are loaded, without those that the user set."""
    warnings: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    """Name, value and reason of each decision."""


def plan(machine: Machine, request: CpuRequest | None = None) -> CpuPlan:
    """Plan the processes, threads, pinning, preloaded libraries and variables of a node's training.

    ``request`` None: the run has no preferences.
    """
    request = request or CpuRequest()
    sizes = _sizes(machine, request)
    why_unpinned = _why_not_pinned(machine, request, sizes)
    pins = () if why_unpinned else pinned(machine.cpus, sizes.processes, sizes.cores_each)
    preload = () if "LD_PRELOAD" in request.env else _preload(machine)
    memory = request.memory or machine.memory
    return CpuPlan(
        machine=machine,
        cores=sizes.cores,
        processes=sizes.processes,
        threads=sizes.threads,
        pins=pins,
        preload=preload,
        shm=shm_of(memory) if memory else None,
        env={name: str(sizes.threads) for name in THREAD_VARIABLES if name not in request.env},
        warnings=tuple(_warnings(machine, request, sizes, _preload(machine))),
        rows=(
            *_rows_of_machine(machine, request, sizes),
            *_rows_of_processes(request, sizes, pins, why_unpinned),
            *_rows_of_environment(machine, request, sizes),
        ),
    )


def shm_of(memory: int) -> int:
    """Compute the size of /dev/shm: half of the memory that the process may use, in bytes.

    Its files count as the container's memory. Half is also Linux's default for a tmpfs: the ranks' messages
    and a data loader's batches fit. A full /dev/shm is an error of the process that fills it; without a
    limit, the kernel would kill a rank.
    """
    return memory // 2


def _sizes(machine: Machine, request: CpuRequest) -> Sizes:
    """Divide the cores among processes, and the cores of each process among threads."""
    cores = min(machine.cores, request.cpus or math.inf)
    cores_of_socket = len({cpu.core for cpu in machine.cpus}) / machine.sockets_apart
    # One process for each socket, but for no more sockets than the run's cores fill.
    processes = request.processes or math.ceil(cores / cores_of_socket)
    fair = max(1, math.floor(cores / (processes * request.subprocesses)))
    # The other variables follow the user's OMP_NUM_THREADS: torch uses the least of them.
    return Sizes(cores, processes, request.subprocesses, fair, request.threads or fair)


def _why_not_pinned(machine: Machine, request: CpuRequest, sizes: Sizes) -> str | None:
    """Return the first reason why ranks are not pinned to cores; None: they are pinned."""
    user_affinity = [name for name in AFFINITY_VARIABLES if name in request.env]
    reasons = {
        f"run.env: {', '.join(user_affinity)} decides": bool(user_affinity),
        "one process: it has all that is granted": sizes.processes == 1,
        "more processes than cores": sizes.processes > len({cpu.core for cpu in machine.cpus}),
        "run.env: OMP_NUM_THREADS is not the plan's": sizes.threads != sizes.fair,
        "a quota grants time, not processors: others compute on the same ones": machine.quota is not None
        and machine.quota < len(machine.cpus),
        "run.resources.cpu is less than what is granted: others may have the rest": sizes.cores
        < machine.cores,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _preload(machine: Machine) -> tuple[str, ...]:
    """List the paths of the libraries to preload that the node has: an allocator, and Intel's OpenMP."""
    libraries = machine.libraries or {}
    allocator = libraries.get("tcmalloc") or libraries.get("jemalloc")
    return tuple(filter(None, (allocator, libraries.get("iomp5"))))


def _rows_of_machine(machine: Machine, request: CpuRequest, sizes: Sizes) -> Iterator[Row]:
    """Yield the plan's rows on what the node grants: processors, sockets, cores and memory."""
    kind, origin = ("limit", "as described") if machine.is_described else ("cgroup quota", "of the affinity")
    quota = f"{kind} {machine.quota:g}" if machine.quota else f"no {kind}"
    threads = machine.threads_per_core
    sharing = f"{threads} hyper-threads share a core's arithmetic" if threads > 1 else "no hyper-threads"
    yield Row(
        "granted", f"{machine.processors:g}", f"{counted(len(machine.cpus), 'processor')} {origin}, {quota}"
    )
    yield Row(
        "topology",
        f"{counted(machine.sockets, 'socket')}, {counted(machine.nodes, 'NUMA node')}",
        sharing,
    )
    unused = sizes.cores - sizes.computing * sizes.fair
    leftover = f"; {unused:g} left over by whole threads" if unused > 0 else ""
    is_asked_for = request.cpus and request.cpus <= machine.cores
    why_cores = "run.resources.cpu" if is_asked_for else "what is granted, SMT aside"
    yield Row("cores", f"{sizes.cores:g}", why_cores + leftover)
    if memory := request.memory or machine.memory:
        limit = origin if machine.is_described else "the lesser of the node's and the cgroup's limit"
        yield Row("memory", format_bytes(memory), "run.resources.memory" if request.memory else limit)
        yield Row(
            "shared memory",
            format_bytes(shm_of(memory)),
            "the size of /dev/shm: half of the memory, of which it is part",
        )


def _rows_of_processes(
    request: CpuRequest, sizes: Sizes, pins: tuple[tuple[Cpu, ...], ...], unpinned: str | None
) -> Iterator[Row]:
    """Yield the plan's rows on processes, threads and pinning; ``unpinned``: why ranks are not pinned."""
    computing = f"{sizes}" if sizes.subprocesses == 1 else f"({sizes})"
    formula = f"floor({counted(sizes.cores, 'core')} / {computing}), at least 1"
    by_sockets = "one for each socket that the cores fill; sockets of one NUMA node count as one"
    why = "run.nproc_per_node" if request.processes else by_sockets
    yield Row("processes", str(sizes.processes), why)
    if sizes.subprocesses > 1:
        yield Row("subprocesses", str(sizes.subprocesses), "run.subprocesses: of each process, on its cores")
    yield Row("threads", str(sizes.threads), "run.env" if sizes.threads != sizes.fair else formula)
    if unpinned:
        yield Row("pinning", "none", unpinned)
        return
    listed = "; ".join(f"rank {rank}: {processor_ranges(pin)}" for rank, pin in enumerate(pins))
    within_node = all(len({cpu.node for cpu in pin}) == 1 for pin in pins)
    why = "each rank within one NUMA node" if within_node else "a rank needs more cores than a NUMA node has"
    yield Row("pinning", listed, why)


def _rows_of_environment(machine: Machine, request: CpuRequest, sizes: Sizes) -> Iterator[Row]:
    """Yield the plan's rows on oneCCL, preloaded libraries and variables."""
    if request.backend == "ccl":
        yield Row("oneCCL workers", "none", "one thread of each process drives oneCCL, and sleeps between")
    if "LD_PRELOAD" in request.env:
        yield Row("preload", request.env["LD_PRELOAD"], "run.env")
    elif machine.libraries is None:  # not searched: the node may have them
        yield Row("preload", "", "tcmalloc or jemalloc, and libiomp5, where the node has them")
    else:
        preloaded = ", ".join(_preload(machine))
        yield Row("preload", preloaded or "none", "an allocator and OpenMP, where they are installed")
    from_plan = [name for name in THREAD_VARIABLES if name not in request.env]
    if from_plan:
        yield Row(", ".join(from_plan), str(sizes.threads), "threads")
    for name in (*THREAD_VARIABLES, *AFFINITY_VARIABLES):
        if name in request.env:
            yield Row(name, request.env[name], "run.env")


def pinned(cpus: Sequence[Cpu], processes: int, cores_each: int) -> tuple[tuple[Cpu, ...], ...]:
    """Give each process ``cores_each`` cores of its own; return the logical processors of each process.

    A core comes with all its hyper-threads. A process gets cores of the first NUMA node that has enough free
    ones; if no node has, it gets the first free cores. Cores that are left over are shared by all processes
    on their NUMA node, for data loaders and collectives.
    """
    free = list(dict.fromkeys((cpu.node, cpu.core) for cpu in cpus))  # each pair of NUMA node and core once
    cores_by_process = []
    for _ in range(processes):
        # dict(free) has the NUMA nodes that have free cores, in order.
        free_by_node = ([core for core in free if core[0] == node] for node in dict(free))
        taken = next((cores for cores in free_by_node if len(cores) >= cores_each), free)[:cores_each]
        free = [core for core in free if core not in taken]
        cores_by_process.append(taken)
    pins = []
    for taken in cores_by_process:  # with them, the cores of its NUMA nodes that no process took
        nodes = {node for node, _ in taken}
        cores = {core for _, core in taken} | {core for node, core in free if node in nodes}
        pins.append(tuple(cpu for cpu in cpus if cpu.core in cores))
    return tuple(pins)


def processor_ranges(cpus: Iterable[Cpu]) -> str:
    """Write the numbers of processors as the kernel does: 0, 1, 2, 5 is ``0-2,5``."""
    ranges: list[list[int]] = []  # the first and the last number of each
    for number in sorted(cpu.number for cpu in cpus):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _warnings(machine: Machine, request: CpuRequest, sizes: Sizes, preload: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each common mistake with the cores and the memory of a node, with what to do.

    ``preload``: paths of the libraries that the plan preloads unless the user sets LD_PRELOAD.
    """
    yield from _warn_of_excess(machine, request)
    yield from _warn_of_topology(machine, sizes)
    yield from _warn_of_threads(request, sizes)
    for name in AFFINITY_VARIABLES:
        if name in request.env and sizes.processes > 1:
            yield (
                f"run.env: {name}={request.env[name]} wins over the CPU plan's pinning, and is the same for "
                f"all {sizes.processes} ranks of a node; leave it out to give each rank cores of its own"
            )
    if "LD_PRELOAD" in request.env:
        preloaded = request.env["LD_PRELOAD"]
        missing = [path for path in preload if path not in preloaded]
        if missing:
            yield f"run.env: LD_PRELOAD={preloaded} wins over the CPU plan's, without {', '.join(missing)}"
    yield from _warn_of_workers(request)
    if request.dtype == "bf16" and (warning := bf16_warning(machine.flags)):
        yield warning


def _warn_of_excess(machine: Machine, request: CpuRequest) -> Iterator[str]:
    """Warn if the run asks for more than the node has, or its pod requests less than its limit."""
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


def _warn_of_topology(machine: Machine, sizes: Sizes) -> Iterator[str]:
    """Warn of more processes than cores, of processes that span sockets, and of a small /dev/shm."""
    if sizes.computing > sizes.cores:
        share = "share" if sizes.computing > 1 else "shares"
        yield f"{sizes} {share} {counted(sizes.cores, 'core')}: oversubscribed"
    sockets = machine.sockets_apart
    cores_of_socket = len({cpu.core for cpu in machine.cpus}) / sockets
    if sizes.fair > cores_of_socket:
        yield (
            f"a process of {sizes.fair} threads spans {sockets} sockets, and reads a part of its "
            f"memory across the link between them; set run.nproc_per_node to {sockets}, or a multiple"
        )
    if machine.shm is not None and machine.shm <= _CONTAINER_SHM and sizes.processes > 1:
        yield (
            f"the shared memory at /dev/shm has {format_bytes(machine.shm)}, as in any container: "
            "ranks and data loaders that exchange tensors there die of SIGBUS; mount a memory-backed volume "
            "there, or run the container with --shm-size"
        )


def _warn_of_threads(request: CpuRequest, sizes: Sizes) -> Iterator[str]:
    """Warn of variables in ``run.env`` that set another number of threads than the plan."""
    scale = f"{sizes} on {counted(sizes.cores, 'core')}"
    for name in THREAD_VARIABLES:
        text = request.env.get(name, "").strip()
        if not text or text == str(sizes.fair):
            continue
        count = int(text) if text.isdecimal() else 0
        # One thread in each process is never too many: that is the least.
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


def _warn_of_workers(request: CpuRequest) -> Iterator[str]:
    """Warn of settings of oneCCL's worker threads, which the backend ccl does not start."""
    has_workers = request.env.get("CCL_WORKER_OFFLOAD", "0") != "0"  # the user turned them on
    # Without a backend in the request, the ranks may choose ccl.
    if request.backend in ("gloo", "mpi") or has_workers:
        return
    for name in ("CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"):
        if request.env.get(name, "1") != "1":
            yield (
                f"run.env: {name}={request.env[name]} has no effect: the backend ccl drives oneCCL without "
                "workers (CCL_WORKER_OFFLOAD=0)"
            )
