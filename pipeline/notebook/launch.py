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
from manycpu.pipeline.notebook.cell import CellDisplay, open_display
from manycpu.pipeline.runfile import read_run_file
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    ExportError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.targets import KINDS, Target, TargetFields
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import absolute, find, open_context
from manycpu.pipeline.verbs.all_verbs import new_run_id, run_all

__all__ = ["AnyTarget", "launch"]

AnyTarget = Target | Mapping[str, Any] | str | os.PathLike[str] | None
_PROGRAM_FIELDS: Final = ("program", "code", "args")  # the function and its arguments replace these
_PATH_FIELDS: Final = ("data", "model", "output")
_MAX_PATH_WARNINGS: Final = 5


def launch(
    function: Callable[..., Any],
    *args: Any,
    target: AnyTarget = None,
    run_id: str | None = None,
    **fields: Any,
) -> Any:
    """Call a function on every rank of a run, and return what rank 0 returned.

    The function travels by value, with what it uses of the notebook. On its node it has the environment
    of every program (``MANYCPU_DATA``, ``MANYCPU_OUTPUT``, ``MANYCPU_CHECKPOINTS``) and its world.

    Args:
        function: The function; defined in a cell, in a script, or in a module beside it.
        args: Its arguments.
        target: A Target, its fields, a kind of target by name, or the path of a run file. Of the file's
            ``run``, program, code, args, data, model and output are not used, and the call's fields win over
            the others. None: this machine.
        run_id: Identifies this run: the same again replaces its output. None: a new one.
        fields: Fields of :class:`manycpu.pipeline.TrainingRun` but ``program`` and ``args``. Without
            ``output``, a model that the function writes is not kept.

    Returns:
        What the function returned on rank 0: at most 64 MiB, pickled.

    Raises:
        BadInputError: A field is wrong, or something the function uses cannot travel; nothing was started.
        TrainingFailedError: The function raised on a rank: its traceback is the message.
        ExportError: There is an ``output``, but the function wrote no model, or its export failed; what the
            function returned is the error's ``returned``.
        ManycpuError: A verb of the run failed, or what was returned cannot travel back.
    """
    __tracebackhide__ = True
    here = Path.cwd()
    run_fields, target_fields, base = _read_target(target)
    run = _run_fields(run_fields, fields, here)
    payload.check_call(function, args)
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
        with open_display() as display:
            display.say(announcement(ctx))
            if ctx.run.device == "xla" and (advice := travel.model_advice(call)):
                display.warn(advice)
            if not same_machine:
                paths = payload.paths_of_here(call, here, data)
                for path, where in [*paths.items()][:_MAX_PATH_WARNINGS]:
                    display.warn(
                        f"{path!r} ({where}) is a path of this machine, which the nodes may not have: "
                        "give it as `data=`, and find it in os.environ['MANYCPU_DATA']"
                    )
            return _run(ctx, display)


def announcement(ctx: RunContext) -> str:
    """Return the line that Accelerate prints about the number of processes."""
    low, high = ctx.run.nodes
    each = ctx.run.nproc_per_node
    what = "CPU" if ctx.run.device == "cpu" else "XLA device"
    total = f"{low * each}" if low == high else f"{low * each} to {high * each}"
    if high == 1:
        return f"Launching training on {total} {what}{'s' if each > 1 else ''}."
    nodes = f"{low}" if low == high else f"{low} to {high}"
    return f"Launching training on {total} {what}s ({nodes} nodes x {each})."


def _read_target(target: AnyTarget) -> tuple[dict[str, Any], TargetFields | Mapping[str, Any] | None, Path]:
    """Return a run file's fields of the run, the target, and the folder of its relative paths."""
    if target is None or isinstance(target, (TargetFields, Mapping)):
        return {}, target, Path.cwd()
    if not isinstance(target, str | os.PathLike):
        fix = "Give a Target, its fields, or the path of a run file"
        raise BadInputError(f"given was {target!r}", field="target", fix=fix)
    if target in KINDS:
        return {}, {"kind": target}, Path.cwd()
    file = Path(target).expanduser()
    if not file.is_file() and file.suffix == "":  # the name of a run file without its suffix
        file = next((named for end in (".yaml", ".yml") if (named := file.with_suffix(end)).is_file()), file)
    run_fields, target_fields = read_run_file(file)
    for name in (*_PROGRAM_FIELDS, *_PATH_FIELDS):
        run_fields.pop(name, None)
    return run_fields, target_fields, file.absolute().parent


def _run_fields(of_file: Mapping[str, Any], of_call: Mapping[str, Any], here: Path) -> dict[str, Any]:
    """Merge the fields of a run file and of the call, which win; relative paths of the call start here."""
    for name in _PROGRAM_FIELDS:
        if name in of_call:
            fix = "Call the function with its arguments: launch(function, 1, 2)"
            raise BadInputError("the program is the function", field=name, fix=fix)
    env = of_call.get("env") or {}
    if not isinstance(env, Mapping):
        raise BadInputError("a mapping is needed", field="env", fix="Write it as {'NAME': 'value'}")
    run = {"output": None, **of_file, **of_call}
    for name in _PATH_FIELDS:
        given = of_call.get(name)
        if isinstance(given, (str, os.PathLike)) and os.fspath(given).strip():
            run[name] = absolute(os.fspath(given), here)
    accelerate = {"ACCELERATE_MIXED_PRECISION": "bf16"} if run.get("dtype") == "bf16" else {}
    run["env"] = {**accelerate, **(of_file.get("env") or {}), **env}
    return run


def _run(ctx: RunContext, display: CellDisplay) -> Any:
    """Do a whole run, and return what rank 0 returned."""
    __tracebackhide__ = True

    def read_returned(handle: Handle) -> None:
        display.returned.read(partial(ctx.driver.read_returned, ctx, handle))

    try:
        run_all(ctx, display, read_returned)
    except CancelledError as ended:
        if isinstance(ended.__cause__, KeyboardInterrupt):  # as Jupyter shows an interrupted cell
            raise KeyboardInterrupt(str(ended)) from None
        raise
    except ExportError as error:
        with suppress(ManycpuError):
            error.returned = display.returned.value()  # type: ignore[attr-defined]
        raise
    except TrainingFailedError as error:
        if (failure := display.failure()) is None:
            raise error from None
        rank, host, trace = failure  # the whole traceback instead of its last lines
        raise TrainingFailedError(f"rank {rank} on {host} failed:\n\n{trace}", field=error.field) from None
    return display.returned.value()
