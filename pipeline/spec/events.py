r"""Lines by which a training process tells what it does: JSON on stdout, each line at most 4,096 bytes.

The limit is ``PIPE_BUF``: a pipe takes that much in one piece, so lines of several ranks never mix.
What each event has, and how it is read, is in :mod:`manycpu.pipeline.spec.event_types`.

>>> encode("progress", step=3, loss=0.5)
'::manycpu:: {"event": "progress", "loss": 0.5, "step": 3}'
>>> split("[rank 1 node-b] loss 0.5")
RankLine(rank=1, host='node-b', text='loss 0.5')
"""

import json
import re
from typing import Any, NamedTuple

__all__ = ["LINE_LIMIT", "PREFIX", "RETURN_LIMIT", "RankLine", "encode", "is_shallow", "join", "split"]

PREFIX = "::manycpu:: "
LINE_LIMIT = 4096
RETURN_LIMIT = 32 << 10
"""Bytes of JSON that a function's arguments, and what it returns, may take: both are kept in databases."""
_DEPTH = 32  # levels of lists and mappings; libraries that write them down again bear not many more
_RANK = re.compile(r"\[rank ([0-9]{1,9}) (\S+)\] ?(.*)", re.DOTALL)


class RankLine(NamedTuple):
    """A line of a training's log; rank and host are None for what the launcher itself said."""

    rank: int | None
    host: str | None
    text: str

    def __str__(self) -> str:
        """Write it as it is in a log."""
        return self.text if self.rank is None or self.host is None else join(self.rank, self.host, self.text)


def encode(event: str, **fields: Any) -> str:
    """Write an event as a line, without its newline.

    Raises:
        ValueError: The line would be longer than 4,096 bytes.
    """
    line = PREFIX + json.dumps({"event": event, **fields}, sort_keys=True, default=str)
    if len(line.encode()) >= LINE_LIMIT:
        raise ValueError(f"event {event!r} takes {len(line.encode())} bytes; a line holds {LINE_LIMIT - 1}")
    return line


def join(rank: int, host: str, text: str) -> str:
    """Say which rank on which host wrote a line."""
    return f"[rank {rank} {host}] {text}"


def is_shallow(value: object, levels: int = _DEPTH) -> bool:
    """Whether what JSON can hold has at most so many levels of lists and mappings."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inner)


def split(line: str) -> RankLine:
    """Undo :func:`join`."""
    match = _RANK.fullmatch(line.rstrip("\r\n"))
    if match is None:
        return RankLine(None, None, line.rstrip("\r\n"))
    return RankLine(int(match[1]), match[2], match[3])
