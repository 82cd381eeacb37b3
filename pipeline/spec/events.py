r"""Lines by which a training process tells what it does: JSON on stdout, each line at most 4,096 bytes.

The limit is ``PIPE_BUF``: a pipe takes that much in one piece, so lines of several ranks never mix.

A script may print anything: what is no event in the shape that its readers count on is an ordinary line.

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
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["LINE_LIMIT", "PREFIX", "RankLine", "decode", "encode", "join", "readable", "split"]

PREFIX = "::manycpu:: "
LINE_LIMIT = 4096
_RANK = re.compile(r"\[rank ([0-9]{1,9}) (\S+)\] ?(.*)", re.DOTALL)
_DEPTH: Final = 32  # levels of lists and mappings; libraries that write them down again bear not many more


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_count(value: object) -> bool:
    return _is_number(value) and 0 <= value < 1 << 63  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "proof": ("rank", "world_size", "host"),
    "backend": ("observed",),
    "progress": (),
    "metrics": ("values",),
    "warning": ("message",),
    "error": ("message",),
    "exit": ("code", "host"),
}
"""Event of ours -> fields that it always has."""
_CHECKS: Final[Mapping[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("rank", "world_size", "round", "code"), _is_whole),
    **dict.fromkeys(("step", "total_steps"), _is_count),
    **dict.fromkeys(("epoch", "loss", "samples_per_second", "seconds_left", "cpus", "threads"), _is_number),
    **dict.fromkeys(
        ("host", "hostname", "meeting", "backend", "backend_reason", "observed", "message"), _is_text
    ),
    "values": _is_mapping,
}
"""Field of an event of ours -> what it has to be; one that is not needed may be null."""


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
    """Read an event from a rank's line (without its rank prefix); None when it is ordinary output.

    An event of ours has the fields that it needs, each of its type; others may have any fields.
    """
    if not text.startswith(PREFIX):
        return None
    try:
        fields = json.loads(text[len(PREFIX) :])
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # half of a character could not be written again
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and _is_event(fields) else None


def _is_event(fields: dict[str, Any]) -> bool:
    kind = fields.get("event")
    if not isinstance(kind, str) or not _is_shallow(fields, _DEPTH):
        return False
    needed = _NEEDED.get(kind)
    return needed is None or all(
        check(fields.get(name)) or (name not in needed and fields.get(name) is None)
        for name, check in _CHECKS.items()
    )


def _is_shallow(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(one, levels - 1) for one in inner)


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
        return "met: " + ", ".join(_listed(event, _MEETING))
    if kind in ("warning", "error", "start"):
        return f"{kind}: {event.get('message', '')}"
    return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")


def _progress(event: dict[str, Any]) -> list[str]:
    total = f" of {event['total_steps']}" if event.get("total_steps") else ""
    words = [f"step {event['step']}{total}"] if event.get("step") is not None else []
    return [*words, *_listed(event, _STEP)]


def _listed(event: dict[str, Any], formats: Mapping[str, str]) -> list[str]:
    return [text.format(event[name]) for name, text in formats.items() if event.get(name) is not None]


_MEETING: Final = {
    "world_size": "world size {}",
    "backend": "backend {}",
    "cpus": "{:g} cores",
    "threads": "{} threads",
    "backend_reason": "this backend because {}",
}
_STEP: Final = {
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.4g}",
    "grad_norm": "gradient norm {:.3g}",
    "learning_rate": "learning rate {:.3g}",
    "samples_per_second": "{:.1f} samples/s",
    "seconds_left": "{:.0f} s left",
}
