"""Lines that only look like events, or are events in a shape of their own: what any script may print."""

import json
from typing import Any, Final

from manycpu.pipeline.spec.events import PREFIX

_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    10**30,
    1e308,
    "",
    "x",
    "\ud800",
    "[/b]",
    [],
    [1, [2]],
    {},
    {"a": {"b": "\udfff"}},
)
_FIELDS: Final = {
    "proof": ("rank", "world_size", "host", "hostname", "cpus", "round", "backend", "threads"),
    "progress": (
        "step",
        "total_steps",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "samples_per_second",
        "seconds_left",
        "time",
    ),
    "backend": ("observed", "requested"),
    "metrics": ("values", "step"),
    "start": ("message",),
    "warning": ("message",),
    "error": ("message", "rank"),
    "exit": ("code", "host", "rank"),
    "own": ("seconds_left", "rank", "values", "time"),
}
_WHOLE: Final[dict[str, Any]] = {
    "rank": 0,
    "world_size": 1,
    "host": "a",
    "code": 1,
    "values": {"loss": 1.0},
    "message": "m",
    "observed": "gloo",
}


def _others() -> list[str]:
    return [
        "::manycpu::",
        PREFIX,
        PREFIX + "{",
        PREFIX + "[" * 3000,
        PREFIX + '{"event": "metrics", "values": ' + '{"a":' * 600 + "1" + "}" * 601,
        PREFIX + '{"event": "progress", "step": ' + "9" * 4000 + "}",
        PREFIX + '{"event": "progress", "step": ' + "9" * 5000 + "}",
        PREFIX + '{"event": "progress", "loss": NaN, "seconds_left": Infinity}',
        PREFIX + '{"event": "metrics", "values": {"loss": NaN, "[/b]": "[/c]"}}',
        *(
            PREFIX + text
            for text in ("null", "7", '"event"', "[]", '["event"]', "{}", '{"event": 7}', "nul\0")
        ),
        *(PREFIX + json.dumps({"event": name}) for name in _FIELDS),
        f"[rank {'9' * 5000} a] text",
        "[rank ² a] text",
    ]


NASTY: Final = [
    *_others(),
    *(
        PREFIX + json.dumps({"event": name, **_WHOLE, field: value})
        for name, fields in _FIELDS.items()
        for field in fields
        for value in _VALUES
    ),
]
"""Without the prefix of a rank."""
