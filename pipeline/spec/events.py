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

__all__ = ["LINE_LIMIT", "PREFIX", "RankLine", "decode", "encode", "join", "readable", "split"]

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


def readable(line: RankLine) -> str:
    """Write a line for people: events as sentences, ordinary output as it is, each with its rank.

    >>> readable(RankLine(0, "a", encode("progress", step=2, total_steps=8, loss=1.5)))
    '[rank 0 a] step 2 of 8, loss 1.5'
    """
    event = decode(line.text)
    text = line.text if event is None else _sentence(event)
    return text if line.rank is None or line.host is None else join(line.rank, line.host, text)


def _sentence(event: dict[str, Any]) -> str:
    kind = event["event"]
    if kind == "progress":
        return ", ".join(_progress(event))
    if kind == "proof":
        words = "met: world size {world_size}, backend {backend}, {cpus:g} cores, {threads} threads"
        return words.format_map(event)
    if kind in ("warning", "error", "start"):
        return f"{kind}: {event.get('message', '')}"
    return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")


def _progress(event: dict[str, Any]) -> list[str]:
    total = f" of {event['total_steps']}" if event.get("total_steps") else ""
    words = [f"step {event['step']}{total}"] if event.get("step") is not None else []
    formats = {
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.4g}",
        "grad_norm": "gradient norm {:.3g}",
        "learning_rate": "learning rate {:.3g}",
        "samples_per_second": "{:.1f} samples/s",
        "seconds_left": "{:.0f} s left",
    }
    return words + [text.format(event[name]) for name, text in formats.items() if event.get(name) is not None]
