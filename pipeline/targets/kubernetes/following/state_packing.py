"""Pack what the ledger keeps of an attempt into a ConfigMap, which takes 1 MiB with all its keys.

A few ranks are kept as they are, for people to read; many as compressed JSON, ranks of a meeting as spans.
Where even that is too much, what only matters for older meetings and logs goes first: its end never does.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from manycpu.pipeline.spec.observed import Series

__all__ = ["LIMIT", "least", "pack", "unpack"]

Fields = dict[str, Any]
LIMIT: Final = 400_000  # characters
_PLAIN: Final = 32_000  # characters: more is packed
_ROUNDS: Final = 8  # the last meetings, which are kept where all are too many
_ENTRIES: Final = 4096  # of other lists, the same
_POINTS: Final = 40  # of a curve, the same


def pack(fields: Fields) -> Fields:
    """Pack an attempt's fields for the ledger; the oldest are left out where it is too much.

    Args:
        fields: Of a ``Kept``: ``attempt``, ``cursor``, ``observed`` and more.
    """
    plain = json.dumps(fields)
    if len(plain) <= _PLAIN:
        return fields
    for leave_out in _LESS:
        packed = _compressed(leave_out(fields))
        if len(packed) <= LIMIT:
            break
    return {"attempt": fields["attempt"], "packed": packed}


def least(fields: Fields) -> Fields:
    """Pack the least that shows how an attempt went: for a ledger that takes no more."""
    return {"attempt": fields["attempt"], "packed": _compressed(_only_the_end(fields))}


def unpack(written: Mapping[str, Any]) -> Fields:
    """Unpack fields that :func:`pack` made.

    Raises:
        ValueError: It is nothing of ours.
    """
    if "packed" not in written:
        return dict(written)
    try:
        fields: Fields = json.loads(zlib.decompress(base64.b64decode(written["packed"])))
        return _with_rounds(
            fields, (meeting | {"ranks": [*_ranks(meeting["ranks"])]} for meeting in _rounds(fields))
        )
    except (zlib.error, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"what the ledger holds of the ranks cannot be read: {error}") from error


def _compressed(fields: Fields) -> str:
    short = _with_rounds(
        fields, (meeting | {"ranks": _spans(meeting["ranks"])} for meeting in _rounds(fields))
    )
    return base64.b64encode(zlib.compress(json.dumps(short).encode(), 9)).decode()


def _as_it_is(fields: Fields) -> Fields:
    return fields


def _without_the_oldest(fields: Fields) -> Fields:
    """Keep the last meetings, and the last of whatever else grows with time."""
    observed = fields.get("observed", {})
    last = {name: observed[name][-_ENTRIES:] for name in ("introduced", "warnings") if name in observed}
    cursor = dict([*fields.get("cursor", {}).items()][-_ENTRIES:])
    curves = {name: Series(**series).thinned(_POINTS) for name, series in observed.get("series", {}).items()}
    thin = {"series": {name: curve.model_dump() for name, curve in curves.items()}}
    shortened = fields | {"cursor": cursor, "observed": observed | last | thin}
    return _with_rounds(shortened, _rounds(shortened)[-_ROUNDS:])


def _only_the_last_meeting(everything: Fields) -> Fields:
    fields = _without_the_oldest(everything)
    observed = {name: value for name, value in fields.get("observed", {}).items() if name != "introduced"}
    shortened = fields | {"cursor": {}, "parted": {}, "observed": observed}
    return _with_rounds(shortened, _rounds(shortened)[-1:])


def _only_the_end(fields: Fields) -> Fields:
    """Leave out what a script reported, too: its metrics are in the output as well."""
    left_out = {"metrics", "series", "warnings", "failure"}
    shortened = _only_the_last_meeting(fields)
    observed = {name: value for name, value in shortened["observed"].items() if name not in left_out}
    return shortened | {"observed": observed}


_LESS: Final[tuple[Callable[[Fields], Fields], ...]] = (
    _as_it_is,
    _without_the_oldest,
    _only_the_last_meeting,
    _only_the_end,
)
"""What is left out: as little as will do."""


def _rounds(fields: Fields) -> list[Fields]:
    return list(fields.get("observed", {}).get("rounds", ()))


def _with_rounds(fields: Fields, rounds: Iterable[Fields]) -> Fields:
    meetings = [*rounds]
    return fields | {"observed": fields.get("observed", {}) | {"rounds": meetings}} if meetings else fields


def _spans(ranks: Iterable[int]) -> list[list[int]]:
    """Write numbers as spans, first and last: of thousands of ranks there is mostly one."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def _ranks(spans: Iterable[list[int]]) -> Iterator[int]:
    for first, last in spans:
        yield from range(first, last + 1)
