r"""Lines by which a training process tells what it does: JSON on stdout, each line at most 4,096 bytes.

The limit is ``PIPE_BUF``: a pipe takes that much in one piece, so lines of several ranks never mix.

>>> encode("progress", step=3, loss=0.5)
'::manycpu:: {"event": "progress", "loss": 0.5, "step": 3}'
>>> decode("::manycpu:: {\"event\": \"progress\", \"step\": 3}")
{'event': 'progress', 'step': 3}
>>> decode("epoch 1 of 3") is None
True
>>> split("[rank 1 node-b] loss 0.5")
RankLine(rank=1, host='node-b', text='loss 0.5')
"""

import json
import re
from typing import Any, NamedTuple

__all__ = ["LINE_LIMIT", "PREFIX", "RankLine", "decode", "encode", "join", "split"]

PREFIX = "::manycpu:: "
LINE_LIMIT = 4096
_RANK = re.compile(r"\[rank (\d+) (\S+)\] ?(.*)", re.DOTALL)


class RankLine(NamedTuple):
    """A line of a training's log; rank and host are None for what the launcher itself said."""

    rank: int | None
    host: str | None
    text: str


def encode(event: str, **fields: Any) -> str:
    """Write an event as a line, without its newline.

    Raises:
        ValueError: The line would be longer than 4,096 bytes.
    """
    line = PREFIX + json.dumps({"event": event, **fields}, sort_keys=True, default=str)
    if len(line.encode()) >= LINE_LIMIT:
        raise ValueError(f"event {event!r} takes {len(line.encode())} bytes; a line holds {LINE_LIMIT - 1}")
    return line


def decode(text: str) -> dict[str, Any] | None:
    """Read an event from a rank's line (without its rank prefix); None when it is ordinary output."""
    if not text.startswith(PREFIX):
        return None
    try:
        fields = json.loads(text[len(PREFIX) :])
    except json.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("event"), str) else None


def join(rank: int, host: str, text: str) -> str:
    """Say which rank on which host wrote a line."""
    return f"[rank {rank} {host}] {text}"


def split(line: str) -> RankLine:
    """Undo :func:`join`."""
    match = _RANK.fullmatch(line.rstrip("\r\n"))
    if match is None:
        return RankLine(None, None, line.rstrip("\r\n"))
    return RankLine(int(match[1]), match[2], match[3])
