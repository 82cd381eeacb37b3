r"""The hosts of a ``baremetal`` target, as a hostfile names them.

>>> parse("node-a\nnode-b:2  # big\nnode-c slots=4\n")
(Host(name='node-a', slots=None), Host(name='node-b', slots=2), Host(name='node-c', slots=4))
"""

import re

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.placement import Host

__all__ = ["parse"]

_FIELD = "target.hostfile"
_SHAPE = "Write a host on each line: `name`, `name:processes` or `name slots=processes`"
# A name must not begin with a dash: ssh would read it as an option.
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%a-z]+\])"
    r"(?::(?P<count>\S*)|(?P<words>(?:\s+\S+=\S*)*))"
)
_WORDS = {"slots", "max_slots", "max-slots"}


def parse(text: str) -> tuple[Host, ...]:
    """Read a hostfile of any of the three MPIs; IPv6 addresses stand in brackets.

    Raises:
        BadInputError: A line cannot be read, a host is named twice, or there is none.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        host = _host(words, number)
        if host.name in hosts:
            raise BadInputError(
                f"line {number} names the host {host.name!r} a second time",
                field=_FIELD,
                fix="Name each host once; run.nproc_per_node says how many processes it gets",
            )
        hosts[host.name] = host
    if not hosts:
        raise BadInputError("the file names no host", field=_FIELD, fix=_SHAPE)
    return tuple(hosts.values())


def _host(words: str, number: int) -> Host:
    match = _LINE.fullmatch(words)
    if match is None:
        raise BadInputError(f"line {number} cannot be read: {words!r}", field=_FIELD, fix=_SHAPE)
    settings = dict(setting.split("=", 1) for setting in (match["words"] or "").split())
    if unknown := settings.keys() - _WORDS:
        raise BadInputError(
            f"line {number} says {min(unknown)!r}, which nobody reads", field=_FIELD, fix=_SHAPE
        )
    count = match["count"] if match["count"] is not None else settings.get("slots")
    if count is not None and not re.fullmatch(r"[1-9][0-9]{0,5}", count):
        raise BadInputError(
            f"line {number} gives the host {match['name']!r} {count!r} processes", field=_FIELD, fix=_SHAPE
        )
    return Host(match["name"].strip("[]"), int(count) if count else None)
