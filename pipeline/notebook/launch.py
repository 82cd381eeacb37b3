"""launch: call a function on every rank of a run, and return what rank 0 returned."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from manycpu.pipeline.node.function import versions
from manycpu.pipeline.notebook import payload, travel
from manycpu.pipeline.notebook.shown import Shown, shown
from manycpu.pipeline.runfile import read_run_file
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    ExportError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.targets import KINDS, BareMetal, Kubernetes, Local, Target
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import absolute, open_context
from manycpu.pipeline.targets.runs import find
from manycpu.pipeline.verbs.all_verbs import new_run_id, run_all

__all__ = ["AnyTarget", "launch"]

AnyTarget = Target | Mapping[str, Any] | str | os.PathLike[str] | None
_OF_THE_CALL: Final = ("program", "code", "args", "data", "model", "output")
_PATHS: Final = ("data", "model", "output")


def launch(
    function: Callable[..., Any],
    *args: Any,
    target: AnyTarget = None,
    run_id: str | None = None,
    **fields: Any,
) -> Any:
    """Call a function on every rank of a run, and return what rank 0 returned.

    The function travels by value, with what it uses of the notebook. On its node it finds the environment
    of every program (``MANYCPU_DATA``, ``MANYCPU_OUTPUT``, ``MANYCPU_CHECKPOINTS``), and its world.

    Args:
        function: The function; defined in a cell, in a script, or in a module beside it.
        args: Its arguments.
        target: Where: a Target, its fields, the path of a run file (whose fields of ``run`` count, too, where
            the call gives no others, but for its program, data, model and output), or a kind of target by
            name. None: this machine.
        run_id: Tells this run from every other: the same again replaces its output. None: a new one.
        fields: Fields of :class:`manycpu.pipeline.TrainingRun` but ``program`` and ``args``; ``output`` may
            be left out, then what the function writes to a model's folder is nowhere.

    Returns:
        What the function returned on rank 0: at most 64 MiB, pickled.

    Raises:
        BadInputError: A field is wrong, or something the function uses cannot travel; nothing was started.
        TrainingFailedError: The function raised on a rank: its traceback is the message.
        ExportError: There is an ``output``, and nothing was written to it, or it did not get there; what the
            function returned is the error's ``returned``.
        ManycpuError: A verb of the run failed, or what was returned cannot travel back.
    """
    __tracebackhide__ = True
    run_fields, target_fields, base = _where(target)
    _refuse_program(fields)
    here = Path.cwd()
    payload.check_call(function, args)
    run = {"output": None, **run_fields, **_anchored(fields, here)}
    of_accelerate = {"ACCELERATE_MIXED_PRECISION": "bf16"} if run.get("dtype") == "bf16" else {}
    if not isinstance(fields.get("env") or {}, Mapping):
        fix = "Write it as {'NAME': 'value'}"
        raise BadInputError("a mapping is needed", field="env", fix=fix)
    run["env"] = {**of_accelerate, **(run_fields.get("env") or {}), **(fields.get("env") or {})}
    name = run_id or new_run_id()
    with TemporaryDirectory(prefix="manycpu-function-") as folder:
        script = Path(folder, payload.script_of(function))
        script.touch()  # the run is validated before anything is pickled
        ctx = open_context(
            {**run, "program": str(script), "args": ()}, target_fields, "notebook", name, base=base
        )
        ctx = replace(find(ctx) if run_id else ctx, needs=versions())
        data = ctx.run.data if ctx.run.data and "://" not in ctx.run.data else None
        same_machine = ctx.target.is_this_machine
        call = travel.Call(function, args)
        payload.write(Path(folder), call, base=here, data=data, same_machine=same_machine)
        with shown() as display:
            display.say(announcement(ctx))
            if ctx.run.device == "xla" and (advice := travel.model_advice(call)):
                display.warn(advice)
            if not same_machine:
                _warn_of_paths(display, payload.paths_of_here(call, here, data))
            return _returned(ctx, display)


def announcement(ctx: RunContext) -> str:
    """Say how wide a run is, in Accelerate's words."""
    low, high = ctx.run.nodes
    each = ctx.run.nproc_per_node
    what = "CPU" if ctx.run.device == "cpu" else "XLA device"
    total = f"{low * each}" if low == high else f"{low * each} to {high * each}"
    if high == 1:
        return f"Launching training on {total} {what}{'s' if each > 1 else ''}."
    nodes = f"{low}" if low == high else f"{low} to {high}"
    return f"Launching training on {total} {what}s ({nodes} nodes x {each})."


def _where(target: AnyTarget) -> tuple[dict[str, Any], Target | Mapping[str, Any] | None, Path]:
    """Read a target: fields of a run that come with it, the target, and the folder of its relative paths."""
    if target is None or isinstance(target, (Local, BareMetal, Kubernetes, Mapping)):
        return {}, target, Path.cwd()
    if not isinstance(target, str | os.PathLike):
        fix = "Give a Target, its fields, or the path of a run file"
        raise BadInputError(f"given was {target!r}", field="target", fix=fix)
    if target in KINDS:
        return {}, {"kind": target}, Path.cwd()
    file = Path(target).expanduser()
    if not file.is_file() and file.suffix == "":  # a run file's name alone
        file = next((named for end in (".yaml", ".yml") if (named := file.with_suffix(end)).is_file()), file)
    run_fields, target_fields = read_run_file(file)
    run_fields = {name: value for name, value in run_fields.items() if name not in _OF_THE_CALL}
    return run_fields, target_fields, file.absolute().parent


def _refuse_program(fields: Mapping[str, Any]) -> None:
    for name in ("program", "code", "args"):
        if name in fields:
            fix = "Call the function with its arguments: launch(function, 1, 2)"
            raise BadInputError("the program is the function", field=name, fix=fix)


def _anchored(fields: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Have relative paths of the call start at the notebook's folder, wherever the run file is."""
    given = {name: fields[name] for name in _PATHS if isinstance(fields.get(name), (str, os.PathLike))}
    paths = {name: os.fspath(path) for name, path in given.items()}
    return {**fields, **{name: absolute(path, base) for name, path in paths.items() if path.strip()}}


def _warn_of_paths(display: Shown, paths: Mapping[str, str]) -> None:
    for path, where in [*paths.items()][:5]:
        display.warn(
            f"{path!r} ({where}) is a path of this machine, which the nodes may not have: give it as "
            "`data=`, and find it in os.environ['MANYCPU_DATA']"
        )


def _returned(ctx: RunContext, display: Shown) -> Any:
    __tracebackhide__ = True
    try:
        run_all(ctx, display, partial(_read_returned, ctx, display))
    except CancelledError as ended:
        if isinstance(ended.__cause__, KeyboardInterrupt):  # as whoever pressed the button expects
            raise KeyboardInterrupt(str(ended)) from None
        raise
    except ExportError as error:
        with suppress(ManycpuError):
            error.returned = display.returned.value()  # type: ignore[attr-defined]
        raise
    except TrainingFailedError as error:
        raise _with_traceback(error, display) from None
    return display.returned.value()


def _read_returned(ctx: RunContext, display: Shown, handle: Handle) -> None:
    display.returned.read(partial(ctx.driver.read_returned, ctx, handle))


def _with_traceback(error: TrainingFailedError, display: Shown) -> TrainingFailedError:
    """Put the whole traceback of the rank that failed first where its last lines are."""
    failure = display.failure()
    if failure is None:
        return error
    rank, host, trace = failure
    return TrainingFailedError(f"rank {rank} on {host} failed:\n\n{trace}", field=error.field)
