r"""The lines in which a training process reports events: JSON on stdout, each line at most 4,096 bytes.

The limit is ``PIPE_BUF``: a pipe writes that much at once, so lines of several ranks never mix.
A rank signs its events with a secret that only it and its parent process have in memory; the parent removes
the signature. So the output of a program is never mistaken for a report of manycpu (``RESERVED``).
The fields of each event, and how they are read, are in :mod:`manycpu.pipeline.spec.event_types`.

>>> encode("progress", step=3, loss=0.5)
'::manycpu:: {"event": "progress", "loss": 0.5, "step": 3}'
>>> split("[rank 1 node-b] loss 0.5")
RankLine(rank=1, host='node-b', text='loss 0.5')
"""

import json
import math
import os
import re
from typing import Any, NamedTuple

PREFIX = "::manycpu:: "
LINE_LIMIT = 4096
RESERVED = frozenset(
    {"proof", "backend", "start", "pace", "returned", "result", "error", "finished", "exit"}
    | {"pickled"}  # which notebooks of older versions unpickle
)
"""Events on which decisions depend: only manycpu itself reports them. A program may print all others."""
JSON_LIMIT = 32 << 10
"""Bytes of JSON that a function's arguments, and its return value, may take: both are kept in databases."""
_DEPTH = 32  # levels of lists and mappings; libraries that serialize them again take few more
_SECRET_BYTES = 8
_LONGEST = LINE_LIMIT - len("\n") - len("-") - 2 * _SECRET_BYTES
_RANK = re.compile(r"\[rank ([0-9]{1,9}) (\S+)\] ?(.*)", re.DOTALL)


class RankLine(NamedTuple):
    """A line of a training's log; rank and host are None for output of the launcher itself."""

    rank: int | None
    host: str | None
    text: str

    def __str__(self) -> str:
        """Write the line as it stands in a log."""
        return self.text if self.rank is None or self.host is None else join(self.rank, self.host, self.text)


def encode(event: str, **fields: Any) -> str:
    """Write an event as a line of a rank's output, without its newline; a value that JSON lacks becomes text.

    Raises:
        ValueError: The line, with a signature in place of its prefix, would be longer than 4,096 bytes.
    """
    line = PREFIX + json.dumps({"event": event, **fields}, sort_keys=True, default=str)
    if len(line.encode()) > _LONGEST:
        raise ValueError(f"event {event!r} takes {len(line.encode())} bytes; a line holds {_LONGEST}")
    return line


def missing_lines(count: int) -> str:
    """Return the line of a warning event: that ``count`` lines are missing in a log at this place."""
    which = "1 line is" if count == 1 else f"{count} lines are"
    message = f"{which} missing in the log here, which could not be written for a while: a full disk, perhaps"
    return encode("warning", message=message)


def new_signature() -> str:
    """Make the secret that replaces ``PREFIX`` between a rank and its parent process."""
    return f"::manycpu-{os.urandom(_SECRET_BYTES).hex()}:: "


def join(rank: int, host: str, text: str) -> str:
    """Prefix a line with its rank and host."""
    return f"[rank {rank} {host}] {text}"


def is_shallow(value: object, levels: int = _DEPTH) -> bool:
    """Whether a JSON value has at most ``levels`` levels of lists and mappings."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inner)


def is_plain(value: object) -> bool:
    """Whether a value can be written as JSON and read again with the same types and content."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, [*value, *value.values()])) and all(type(key) is str for key in value)
    if type(value) is str:  # half of a surrogate pair cannot be encoded
        return value.encode(errors="replace").decode() == value
    return value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


def split(line: str) -> RankLine:
    """Split a line into rank, host and text; the inverse of :func:`join`."""
    match = _RANK.fullmatch(line.rstrip("\r\n"))
    if match is None:
        return RankLine(None, None, line.rstrip("\r\n"))
    return RankLine(int(match[1]), match[2], match[3])
