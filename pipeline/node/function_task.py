"""Call the function of a ``@task.manycpu`` task in a rank.

A module is made from the function, and its last line calls :func:`call`. The only argument of that program is
JSON with the function's arguments::

    {"arguments": {"lr": 0.1}, "places": ["data"]}

``places`` names further parameters: data, model, output or checkpoints. Each gets the path that the run has
for it on this node. What rank 0 returns becomes events, in as many lines as it takes.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from manycpu.pipeline.node.emit import NodeExit, say_in_parts
from manycpu.pipeline.spec.events import JSON_LIMIT, is_shallow
from manycpu.pipeline.spec.exit_records import EXIT_RETURNED


def call(function: Callable[..., Any]) -> None:
    """Call a function with the arguments of the task; rank 0 reports what it returns.

    The rank ends with exit code 89 if the value is not JSON of at most 32 KiB, or if the function calls
    ``sys.exit`` without an error, so that there is no value.
    """
    task = json.loads(sys.argv[1])
    paths = {name: os.environ[f"MANYCPU_{name.upper()}"] for name in task["places"]}
    # Sorts the arguments into positional ones and those by name, as the function declares them.
    bound = inspect.BoundArguments(inspect.signature(function), {**task["arguments"], **paths})
    # Before the call: the function may change RANK, or fork.
    rank, process = os.environ.get("RANK", "0"), os.getpid()
    try:
        value = function(*bound.args, **bound.kwargs)
    except SystemExit as end:
        if end.code:  # the function failed
            raise
        raise _refusal(function.__name__, "ended its process (sys.exit) where it is to return") from end
    if rank == "0" and os.getpid() == process:  # not a child that the function forked
        say_in_parts("returned", _as_json(function.__name__, value))


def _as_json(name: str, value: Any) -> str:
    """Write a value as JSON; numbers of numpy and torch become Python's.

    Raises:
        NodeExit: The value is not JSON, or is too deep or too long.
    """
    try:
        text = json.dumps(value, default=_as_number, ensure_ascii=False, allow_nan=False)
        json.loads(text, object_pairs_hook=_check_keys)  # raises if keys such as 1 and "1" became equal
        size = len(text.encode())
        shallow = is_shallow(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(name, f"returned what is no JSON ({error})") from error
    if not shallow:
        raise _refusal(name, "returned lists and mappings in each other, more than 32 levels deep")
    if size > JSON_LIMIT:
        raise _refusal(name, f"returned {size:,} bytes of JSON, and {JSON_LIMIT:,} can be passed on")
    return text


def _check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a mapping from its keys and values in JSON; raise ValueError if two keys are equal in JSON."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two keys of a mapping are {duplicate!r} in JSON, such as 1 and '1'")
    return mapping


def _as_number(value: Any) -> Any:
    """Return the number in a scalar of numpy or torch; raise TypeError for other values, as json expects."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"there is a {type(value).__name__} in it")


def _refusal(name: str, what: str) -> NodeExit:
    """Build the exit with code 89: function ``name`` did ``what``, so there is no value to pass on."""
    fix = "Write it to a file in `output`, and return plain numbers, texts, lists and mappings."
    return NodeExit(EXIT_RETURNED, f"{name} {what}. {fix}")
