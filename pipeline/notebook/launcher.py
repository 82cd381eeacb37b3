"""notebook_launcher: Accelerate's call, on this machine or on a whole cluster."""

import difflib
import inspect
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from manycpu.pipeline.node.function import meet
from manycpu.pipeline.notebook import payload
from manycpu.pipeline.notebook.launch import AnyTarget, launch
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import is_true

__all__ = ["notebook_launcher"]

_DEBUG_VARIABLE: Final = "ACCELERATE_DEBUG_MODE"
_UNUSED_DEFAULTS: Final[Mapping[str, object]] = {
    "use_port": "29500",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}
"""Accelerate's arguments for its rendezvous, with its defaults: a run connects its processes itself."""
_NOT_TRIED_OUT: Final = ("run_id", "data", "model", "output", "checkpoints", "resume_from")
"""Fields that belong to the training, and not to the run that connects its ranks before it."""
_DTYPES: Final = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}


def notebook_launcher(  # noqa: PLR0913, PLR0917 - Accelerate's call
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int | None = None,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int | None = None,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    target: AnyTarget = None,
    timeouts: Mapping[str, int] | None = None,
    **fields: Any,
) -> Any:
    """Call a training function on every process, as Accelerate's function of this name, on any target.

    One call launches all nodes. The run connects the processes itself, so ``use_port``, ``rdzv_*``,
    ``monitor_interval`` and ``log_line_prefix_template`` are accepted and not used.

    Args:
        function: The training function.
        args: Its arguments.
        num_processes: Processes on each node; None: as the run file says, else one for each socket of this
            machine.
        mixed_precision: ``no`` or ``bf16``: the default of ``Accelerator()``; ``fp16`` becomes ``bf16``,
            since CPUs have no fp16. None: as the run file says, else ``no``.
        use_port: Not used.
        master_addr: This machine.
        node_rank: 0: this call.
        num_nodes: Nodes; None: as the run file says, else 1.
        rdzv_backend: Not used.
        rdzv_endpoint: Not used.
        rdzv_conf: Not used.
        rdzv_id: Not used.
        max_restarts: How often failed processes are restarted; the function then begins again, and finds
            its checkpoints in ``MANYCPU_CHECKPOINTS``. None: as the run file says, else 0.
        monitor_interval: Not used.
        log_line_prefix_template: Not used.
        target: As in :func:`launch`; None: this machine.
        timeouts: ``acknowledge``, ``queue``, ``start``, ``run``, ``stall`` -> seconds.
        fields: More fields of the run: ``data``, ``output``, ``backend``, ``env``, ``resources``, ...

    Returns:
        What the function returned on rank 0.

    Raises:
        BadInputError: An argument is wrong, or something the function uses cannot travel; nothing was
            started.
        TrainingFailedError: The function raised on a rank: its traceback is the message.
        ManycpuError: The run failed otherwise.
    """
    __tracebackhide__ = True
    _refuse_unknown(fields)
    if not isinstance(timeouts or {}, Mapping):
        fix = "Write it as {'start': 600}: acknowledge, queue, start, run or stall, and seconds"
        raise BadInputError(f"given was {timeouts!r}", field="timeouts", fix=fix)
    given = {name: value for name, value in locals().items() if name in _UNUSED_DEFAULTS}
    _refuse_other_nodes(node_rank, master_addr, num_nodes, target)
    counts = {"nnodes": num_nodes, "nproc_per_node": num_processes, "max_restarts": max_restarts}
    run = {
        **{name: count for name, count in counts.items() if count is not None},
        **_dtype(mixed_precision),
        **{f"{name}_timeout": seconds for name, seconds in (timeouts or {}).items()},
        **fields,
    }
    unused = [name for name, value in given.items() if str(value) != str(_UNUSED_DEFAULTS[name])]
    if unused:
        _say(f"not needed, and left out: {', '.join(unused)}: the run connects its processes itself")
    payload.check_call(function, args)
    call = partial(launch, target=target)
    if is_true(os.environ.get(_DEBUG_VARIABLE, "")):
        _try_out(call, {name: value for name, value in run.items() if name not in _NOT_TRIED_OUT})
    return call(function, *args, **run)


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    own = [name for name in inspect.signature(notebook_launcher).parameters if name != "fields"]
    known = {*own, *TrainingRun.model_fields, "run_id"}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = (
                f"Did you mean {near[0]!r}?"
                if near
                else f"It takes {', '.join(own)}, and the fields of a run"
            )
            raise BadInputError("there is no such argument", field=name, fix=fix)


def _refuse_other_nodes(node_rank: int, master_addr: str, num_nodes: int | None, target: AnyTarget) -> None:
    one_call = "One call suffices: it starts every node itself. Leave it out, and name the nodes in target="
    if node_rank != 0:
        raise BadInputError(f"this would be node {node_rank}", field="node_rank", fix=one_call)
    if not _is_this_machine(master_addr):
        raise BadInputError(f"{master_addr} is not this machine", field="master_addr", fix=one_call)
    if num_nodes not in (None, 1) and target is None:
        fix = "Say where they are: target='cluster.yaml', with the target baremetal or kubernetes in it"
        raise BadInputError(f"{num_nodes} nodes were asked for, and no target", field="num_nodes", fix=fix)


def _is_this_machine(address: str) -> bool:
    """Whether an address is one of this machine's: then a socket can bind it."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as bound:
            bound.bind(place)
    except OSError:
        return False
    return True


def _dtype(mixed_precision: str | None) -> dict[str, str]:
    if mixed_precision is None:
        return {}
    asked = str(mixed_precision).lower()
    if asked not in _DTYPES:
        fix = "Take 'no' or 'bf16'"
        raise BadInputError(f"CPUs train in no {mixed_precision!r}", field="mixed_precision", fix=fix)
    if asked == "fp16":
        _say("mixed_precision 'fp16' becomes 'bf16': CPUs have no fp16 to train in")
    return {"dtype": _DTYPES[asked]}


def _try_out(call: Callable[..., Any], run: Mapping[str, Any]) -> None:
    """Connect all ranks once before the training, as Accelerate's debug mode does; raise why they cannot."""
    _say(f"{_DEBUG_VARIABLE}: all ranks meet once before the training")
    try:
        seen = call(meet, **run)
    except BadInputError:
        raise
    except ManycpuError as error:
        raise ManycpuError(
            f"an issue was found when verifying the environment: {error}",
            fix="The training was not started. Mend the environment of the ranks, and call again",
        ) from None
    hosts = ", ".join(seen["hosts"])
    _say(f"{_DEBUG_VARIABLE}: {seen['world']} ranks on {hosts} added up their numbers by {seen['backend']}")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - as Accelerate does, into the cell
