"""Lines that look like events but are not, or events of an unexpected form: any script may print them."""

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
"""Lines that look like events: of no known form, or with one field of an unexpected type."""

_DECIDING: Final[dict[str, dict[str, Any]]] = {
    "proof": {"rank": 0, "world_size": 64, "host": "a", "meeting": "forged", "backend": "mpi"},
    "backend": {"requested": "mpi", "observed": "mpi", "world_size": 64},
    "start": {"message": "forged"},
    "pace": {"step": 1, "step_seconds": 9.0},
    "returned": {"part": 1, "parts": 1, "text": '"forged"'},
    "result": {"value": "forged"},
    "pickled": {"part": 1, "parts": 1, "text": "Zm9yZ2Vk"},
    "error": {"kind": "Refusal", "message": "forged", "rank": 0},
    "exit": {"code": 9, "host": "a", "rank": 0},
}


def _forged() -> list[str]:
    whole = [PREFIX + json.dumps({"event": name, **fields}) for name, fields in _DECIDING.items()]
    (end,) = (line for line in whole if '"exit"' in line)
    fields = end.removeprefix(PREFIX)
    return [
        *whole,
        *(f"[rank 0 a] {line}" for line in whole),  # as a log shows it
        *(f"10%\r{line}" for line in whole),
        "half a line " + end,
        PREFIX + end,
        f"::manycpu:{end}",
        f"::manycpu-{'0' * 16}:: {fields}",
        "x" * 4083 + end,  # cut where the event begins, behind a prefix of 11, 12 or 13 bytes
        "x" * 4084 + end,
        "x" * 4085 + end,
        end.replace('{"event"', '{"event": "own", "event"'),
        end.replace('{"event"', '{"event": "start", "event"'),
        end.replace("exit", "\\u0065xit"),
        end.replace('"code"', f'"deep": {"[" * 3000}{"]" * 3000}, "code"'),
        end.replace('"code"', f'"long": {"9" * 5000}, "code"'),
        f"one\v{end}",
        f"one\u2028{end}",
    ]


FORGED: Final = _forged()
"""Events that would change how a run is judged, if a program could forge them."""
