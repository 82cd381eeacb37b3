"""Which processors each process of a node runs on: its own cores, of one NUMA node where they fit."""

from collections.abc import Iterable, Sequence

from manycpu.pipeline.spec.machine import Cpu

__all__ = ["one_node_each", "places", "shown"]


def places(cpus: Sequence[Cpu], processes: int, threads: int) -> tuple[tuple[Cpu, ...], ...]:
    """Give each process ``threads`` cores of its own, with all their hyper-threads.

    A process gets the first NUMA node that has as many cores left, and the first cores of all that are left
    where none has. Cores that are left over in the end serve the data loaders and collectives of the
    processes on their NUMA node.

    Args:
        cpus: What there is, in order; at least ``processes * threads`` cores.
        processes: How many processes there are.
        threads: Cores of each.
    """
    free = list(dict.fromkeys((cpu.node, cpu.core) for cpu in cpus))
    own = []
    for _ in range(processes):
        taken = _fitting(free, threads)
        free = [core for core in free if core not in taken]
        own.append(taken)
    return tuple(_with_rest(cpus, taken, free) for taken in own)


def one_node_each(pins: Iterable[Iterable[Cpu]]) -> bool:
    """Whether every process is within one NUMA node."""
    return all(len({cpu.node for cpu in pin}) == 1 for pin in pins)


def shown(cpus: Iterable[Cpu]) -> str:
    """Write processors as the kernel does: 0, 1, 2, 5 is ``0-2,5``."""
    ranges: list[list[int]] = []
    for number in sorted(cpu.number for cpu in cpus):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _fitting(free: list[tuple[int, int]], threads: int) -> list[tuple[int, int]]:
    for node in dict.fromkeys(node for node, _ in free):
        cores = [core for core in free if core[0] == node]
        if len(cores) >= threads:
            return cores[:threads]
    return free[:threads]


def _with_rest(
    cpus: Sequence[Cpu], taken: list[tuple[int, int]], rest: list[tuple[int, int]]
) -> tuple[Cpu, ...]:
    nodes = {node for node, _ in taken}
    cores = {core for _, core in taken} | {core for node, core in rest if node in nodes}
    return tuple(cpu for cpu in cpus if cpu.core in cores)
