"""Parse the description of a node, as ``manycpu plan --node`` takes it.

>>> describe("sockets=2,cores=56,threads=2,memory=512Gi").cores
112.0
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.machine import Cpu, Machine, numbers
from manycpu.pipeline.spec.words import did_you_mean, format_bytes, parse_memory

EXAMPLE: Final = "sockets=2,cores=56,threads=2,memory=512Gi"

_MAX_PROCESSORS: Final = 100_000
_MIN_MEMORY: Final = 64 << 20  # bytes: less than Python and torch need; a number without a unit is in bytes


def _parse_count(text: str) -> int:
    """Parse a number from 1 to 9999; raises ValueError if it is none, as all parsers here do."""
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise ValueError(f"{text!r} is no count")
    return int(text)


def _parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of processors as Linux writes it: ``0-3,8``."""
    if re.search(r"\d{6}", text):  # a range of these would take all memory
        raise ValueError("no processor has such a number")
    return frozenset(numbers(text))


def _parse_processors(text: str) -> float:
    """Parse an amount of processors as Kubernetes writes it: ``2.5`` or ``2500m``."""
    value = float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is no amount of processors")
    return value


def _parse_memory(text: str) -> int:
    """Parse the memory of a node, in bytes; no node has less than 64 MiB."""
    memory = parse_memory(text)
    if memory < _MIN_MEMORY:
        raise ValueError(f"{text!r} is less than {format_bytes(_MIN_MEMORY)}")
    return memory


def _parse_bf16(text: str) -> frozenset[str]:
    """Parse yes or no; return the flags of a processor that computes in bf16, or of one that does not."""
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    # avx2: an empty set would mean that the processor is unknown.
    return frozenset({"avx512_bf16" if text == "yes" else "avx2"})


# Word -> the parser of its value, and what the value means.
_PARSERS: Final[Mapping[str, tuple[Callable[[str], Any], str]]] = {
    "sockets": (_parse_count, "sockets; default: 1"),
    "cores": (_parse_count, "physical cores of each socket"),
    "threads": (_parse_count, "hyper-threads of each core; default: 1"),
    "numa": (_parse_count, "NUMA nodes of all sockets; default: one for each socket"),
    "cpus": (_parse_cpus, "logical processors that may be used, such as 0-3,8; default: all"),
    "limit": (_parse_processors, "the limit of a pod or cgroup, in processors: 2.5 or 2500m"),
    "request": (_parse_processors, "what the pod requests, in the same way"),
    "memory": (_parse_memory, "memory with its unit, such as 512Gi"),
    "shm": (parse_memory, "size of /dev/shm"),
    "bf16": (_parse_bf16, "whether the processor computes in bf16: yes or no"),
}


def describe(text: str) -> Machine:
    """Parse a node's description: ``WORD=VALUE`` of :data:`_PARSERS`, with commas between.

    Raises:
        BadInputError: A word or a value is none of these, or they contradict one another.
    """
    values = dict(_parse_words(text))
    all_cpus = list(_processors_of(values))
    allowed = values.get("cpus")
    cpus = [cpu for cpu in all_cpus if allowed is None or cpu.number in allowed]
    # cpus= leaves none, or lists one that the node does not have.
    if not cpus or (allowed and max(allowed) >= len(all_cpus)):
        raise _bad_node(f"the node has the processors 0 to {len(all_cpus) - 1}", "Choose cpus= from these")
    limit, request = values.get("limit"), values.get("request")
    guaranteed = None  # unknown: one of the two is not described
    if limit is not None and request is not None:
        guaranteed = limit == request
    return Machine(
        cpus=tuple(sorted(cpus)),
        quota=limit,
        guaranteed=guaranteed,
        memory=values.get("memory"),
        shm=values.get("shm"),
        flags=values.get("bf16", frozenset()),
        is_described=True,
    )


def _parse_words(text: str) -> Iterator[tuple[str, Any]]:
    """Yield each ``WORD=VALUE`` as the word and its parsed value.

    Raises:
        BadInputError: There is no such word, or its value cannot be read.
    """
    # A comma before a digit belongs to a list of processors.
    for part in re.split(r"\s*,\s*(?!\d)", text.strip()):
        name, _, value = part.partition("=")
        if name not in _PARSERS:
            fix = did_you_mean(name, _PARSERS) or f"Choose from: {', '.join(_PARSERS)}"
            raise _bad_node(f"there is no {name!r}", fix)
        parse, meaning = _PARSERS[name]
        try:
            yield name, parse(value)
        except ValueError as error:
            raise _bad_node(f"{name}={value} cannot be read: {error}", f"{name} is: {meaning}") from error


def _processors_of(words: Mapping[str, Any]) -> Iterator[Cpu]:
    """Yield the logical processors of the described node, in the order in which Linux numbers them.

    First comes the first hyper-thread of every core, socket by socket, then the second of every core.

    Raises:
        BadInputError: Cores are missing, there are too many processors, or NUMA nodes do not fit the sockets.
    """
    if "cores" not in words:
        raise _bad_node("cores= is missing", f"Say at least that, as in {EXAMPLE}")
    sockets, cores, threads = (words.get(name, 1) for name in ("sockets", "cores", "threads"))
    total = sockets * cores
    if total * threads > _MAX_PROCESSORS:
        raise _bad_node(f"{total * threads} processors are more than any node has", f"As in {EXAMPLE}")
    nodes = words.get("numa", sockets)
    if nodes % sockets or nodes > total:
        raise _bad_node(
            f"{nodes} NUMA nodes cannot be on {sockets} sockets", "Give a multiple of the sockets"
        )
    for thread in range(threads):
        for core in range(total):
            yield Cpu(
                socket=core // cores,
                node=core * nodes // total,  # its NUMA node
                core=core,
                number=core + thread * total,
            )


def _bad_node(message: str, fix: str) -> BadInputError:
    return BadInputError(message, field="--node", fix=fix)
