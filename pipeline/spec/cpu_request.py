"""What a run asks of each node's CPUs: the input of the CPU plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from manycpu.pipeline.spec import quantity

__all__ = ["AFFINITY_VARIABLES", "THREAD_VARIABLES", "CpuRequest", "Sizes"]

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
    """What a run asks of each node; None: no preference."""

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
    """What the user set in ``run.env``: wins, with a warning where it matters."""

    @property
    def threads(self) -> int | None:
        """OMP_NUM_THREADS, where the user set it to a count; of a list for nested regions the first."""
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
        processes = quantity.counted(self.processes, "process", "es")
        return processes if self.subprocesses == 1 else f"{processes} x {self.subprocesses} subprocesses"
