"""Pack the state of an attempt for the ledger: a ConfigMap holds at most 1 MiB, all keys together.

A small state stays plain JSON, which people can read. A large state becomes compressed JSON, with the ranks
of a meeting as spans. If that is still too large, details of older meetings and logs are dropped first. How
the attempt ended is never dropped.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from manycpu.pipeline.spec.observed import Series

__all__ = ["LIMIT", "least", "pack", "unpack"]

Fields = dict[str, Any]
LIMIT: Final = 400_000  # characters of the packed state
_PLAIN: Final = 32_000  # characters of JSON: a larger state is packed
_ROUNDS: Final = 8  # number of last meetings to keep, if all are too large
_ENTRIES: Final = 4096  # number of last entries to keep of other lists, likewise
_POINTS: Final = 40  # number of points to keep of a curve, likewise


def pack(fields: Fields) -> Fields:
    """Pack an attempt's fields for the ledger; the oldest details are dropped if they are too large.

    Args:
        fields: Of an ``AttemptState``: ``attempt``, ``cursor``, ``observed`` and more.
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
    """Pack only how an attempt ended, for a ledger that has no room for more."""
    return {"attempt": fields["attempt"], "packed": _compressed(_only_the_end(fields))}


def unpack(written: Mapping[str, Any]) -> Fields:
    """Unpack fields that :func:`pack` made.

    Raises:
        ValueError: The packed text cannot be read.
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
    """Keep only the last meetings and the last entries of lists that grow with time; thin out the curves."""
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
    """Drop also what the program reported: the output contains its metrics too."""
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
"""Ways to shorten the fields, from the mildest on; the first that makes them fit is used."""


def _rounds(fields: Fields) -> list[Fields]:
    return list(fields.get("observed", {}).get("rounds", ()))


def _with_rounds(fields: Fields, rounds: Iterable[Fields]) -> Fields:
    meetings = [*rounds]
    return fields | {"observed": fields.get("observed", {}) | {"rounds": meetings}} if meetings else fields


def _spans(ranks: Iterable[int]) -> list[list[int]]:
    """Convert ranks to spans of first and last rank: thousands of ranks are mostly one span."""
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
