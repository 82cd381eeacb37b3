"""Call a function on every rank of a run, and return what rank 0 returned: in two forms.

``launch`` takes the fields of a run. ``notebook_launcher`` takes the arguments of Accelerate's function.
"""

import inspect
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from manycpu.pipeline.functions import pickled
from manycpu.pipeline.functions.program import is_generator_or_async, item_name, script_name
from manycpu.pipeline.node.function import meet, versions
from manycpu.pipeline.notebook.cell import CellDisplay, Returned, block_of_cell
from manycpu.pipeline.runfile import read_run_file
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.targets import KINDS, Target, TargetFields
from manycpu.pipeline.spec.training_run import MISTYPED_URL, TrainingRun
from manycpu.pipeline.spec.words import did_you_mean, is_true
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import absolute, find, open_context
from manycpu.pipeline.verbs.all_verbs import letting_go_after_errors, new_run_id, run_all

AnyTarget = Target | Mapping[str, Any] | str | os.PathLike[str] | None
_PROGRAM_FIELDS: Final = ("program", "code", "args")  # the function and its arguments replace these
_PATH_FIELDS: Final = ("data", "model", "output")
_MAX_PATH_WARNINGS: Final = 5
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
"""Accelerate's arguments that are not used, with its defaults: a run connects its processes itself."""
_FIELDS_OF_TRAINING: Final = ("run_id", "data", "model", "output", "checkpoints", "resume_from")
"""Fields that belong to the training, and not to the run that connects its ranks before it."""
_DTYPES: Final = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}
"""Accelerate's ``mixed_precision`` -> the run's field ``dtype``."""


def launch(
    function: Callable[..., Any],
    *args: Any,
    target: AnyTarget = None,
    run_id: str | None = None,
    **fields: Any,
) -> Any:
    """Call a function on every rank of a run, and return what rank 0 returned.

    The function is pickled, with everything of the notebook that it uses. On its node it has the same
    environment variables as every program, such as ``MANYCPU_DATA``, ``MANYCPU_OUTPUT`` and
    ``MANYCPU_CHECKPOINTS``, and those by which torch connects the ranks.

    Args:
        function: The function; defined in a cell, in a script, or in a module beside the notebook or script.
        args: Its arguments.
        target: A Target, its fields, a kind of target by name, or the path of a run file. Fields of the call
            win over those of the file's ``run``. The file's program, code, args, data, model and output are
            not used. None: this machine.
        run_id: Identifies this run: a call with the same id replaces the run's output, unless the run is
            kept. None: a new id.
        fields: Fields of :class:`manycpu.pipeline.TrainingRun` except ``program`` and ``args``. Without
            ``output``, a model that the function writes is not kept.

    Returns:
        What the function returned on rank 0: at most 64 MiB, pickled.

    Raises:
        BadInputError: A field is wrong, something that the function uses cannot be pickled, or the run of
            ``run_id`` is kept, and its result was returned already. Nothing was started.
        TrainingFailedError: The function raised an error on a rank: its traceback is the message.
        ExportError: There is an ``output``, but the function wrote no model, or its export failed.
        ManycpuError: A verb of the run failed, or what rank 0 returned could not be sent. If it could not be
            read here, the run is kept, and a call with the same ``run_id`` reads it again.

    An error after the training, even a KeyboardInterrupt, has what rank 0 returned as attribute ``returned``.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
    _refuse_unknown(fields, launch)
    working_folder = Path.cwd()
    run_fields, target_fields, base = _read_target(target)
    run = _run_fields(run_fields, fields, working_folder)
    _check_call(function, args)
    chosen_id = run_id or new_run_id()
    with TemporaryDirectory(prefix="manycpu-function-") as folder:
        script = Path(folder, script_name(function))
        script.touch()  # the run is validated before anything is pickled
        ctx = open_context(
            {**run, "program": str(script), "args": ()}, target_fields, "notebook", chosen_id, base=base
        )
        if run_id:
            ctx = find(ctx)  # a repeated run keeps its first name
        ctx = replace(ctx, needs=versions())  # its nodes need this Python, torch and accelerate
        local_data = ctx.run.data or None  # None: there is no data, or it is at a URL
        if local_data is not None and "://" in local_data:
            local_data = None
        same_machine = ctx.target.is_this_machine
        call = pickled.Call(function, args)
        # Writes the script too, in place of the empty one.
        pickled.write(Path(folder), call, base=working_folder, data=local_data, same_machine=same_machine)
        with closing(CellDisplay(block_of_cell())) as display:
            display.say(_announcement(ctx))
            advice = pickled.model_advice(call) if ctx.run.device == "xla" else None
            if advice is not None:
                display.warn(advice)
            if not same_machine:
                paths = pickled.paths_of_here(call, working_folder, local_data)
                for path, container in [*paths.items()][:_MAX_PATH_WARNINGS]:
                    display.warn(
                        f"{path!r} ({container}) is a path of this machine, which the nodes may not have: "
                        "give it as `data=`, and find it in os.environ['MANYCPU_DATA']"
                    )
            return _run_and_return(ctx, display, chosen_id)


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
    """Call a training function in every process, like Accelerate's function of this name, on any target.

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
        master_addr: An address of this machine; any other is refused.
        node_rank: 0; any other is refused, because one call launches all nodes.
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
        BadInputError: An argument is wrong, or something that the function uses cannot be pickled. Nothing
            was started.
        TrainingFailedError: The function raised an error on a rank: its traceback is the message.
        ManycpuError: The run failed otherwise.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
    arguments = dict(locals())  # before any other local exists
    _refuse_unknown(fields, notebook_launcher)
    if not isinstance(timeouts or {}, Mapping):
        fix = "Write it as {'start': 600}: acknowledge, queue, start, run or stall, and seconds"
        raise BadInputError(f"given was {timeouts!r}", field="timeouts", fix=fix)
    _refuse_other_nodes(node_rank, master_addr, num_nodes, target)
    counts = {"nnodes": num_nodes, "nproc_per_node": num_processes, "max_restarts": max_restarts}
    run = {
        **{name: count for name, count in counts.items() if count is not None},
        **_dtype(mixed_precision),
        **{f"{name}_timeout": seconds for name, seconds in (timeouts or {}).items()},
        **fields,
    }
    # As texts: a port may be a number or a text.
    unused = [name for name, default in _UNUSED_DEFAULTS.items() if str(arguments[name]) != str(default)]
    if unused:
        _say(f"not needed, and left out: {', '.join(unused)}: the run connects its processes itself")
    _check_call(function, args)
    if is_true(os.environ.get(_DEBUG_VARIABLE, "")):
        _connect_ranks_once(
            target, run={name: value for name, value in run.items() if name not in _FIELDS_OF_TRAINING}
        )
    return launch(function, *args, target=target, **run)


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Check that a function can be called with its arguments, and that the call itself does the work.

    Raises:
        BadInputError: It is no function, takes other arguments, or is async or a generator.
    """
    if not callable(function):
        fix = "Give the function itself: launch(training_loop, 1, 2)"
        raise BadInputError(f"{function!r} cannot be called", field="function", fix=fix)
    if not isinstance(args, tuple | list):
        fix = "Write them as a tuple: args=(1, 2), or (1,)"
        raise BadInputError(f"args are {args!r}", field="args", fix=fix)
    name = item_name(function)
    if is_generator_or_async(function):
        fix = "Wrap it into a function that does the work"
        message = f"{name} is async or yields: a call of it does nothing"
        raise BadInputError(message, field="function", fix=fix)
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        fix = "Give the function's arguments, as a tuple to notebook_launcher: args=(1,)"
        with_count = f"with {len(args)} argument{'' if len(args) == 1 else 's'}"
        message = f"{name} cannot be called {with_count}: {error}"
        raise BadInputError(message, field="args", fix=fix) from None


def _announcement(ctx: RunContext) -> str:
    """Return the line that Accelerate prints about the number of processes."""
    least, most = ctx.run.nodes
    per_node = ctx.run.nproc_per_node
    device = "CPU" if ctx.run.device == "cpu" else "XLA device"
    if most == 1:
        return f"Launching training on {per_node} {device}{'s' if per_node > 1 else ''}."
    if least == most:
        return f"Launching training on {least * per_node} {device}s ({least} nodes x {per_node})."
    total = f"{least * per_node} to {most * per_node}"
    return f"Launching training on {total} {device}s ({least} to {most} nodes x {per_node})."


def _read_target(target: AnyTarget) -> tuple[dict[str, Any], TargetFields | Mapping[str, Any] | None, Path]:
    """Read what the caller gave as target: a string is a kind of target, or the path of a run file.

    A run file may be named without its suffix.

    Returns:
        The fields of a run file's ``run``, or an empty mapping; the target or its fields; and the folder from
        which their relative paths start.

    Raises:
        BadInputError: ``target`` is of another type, or the run file is wrong.
    """
    if target is None or isinstance(target, (TargetFields, Mapping)):
        return {}, target, Path.cwd()
    if not isinstance(target, str | os.PathLike):
        fix = "Give a Target, its fields, or the path of a run file"
        raise BadInputError(f"given was {target!r}", field="target", fix=fix)
    if target in KINDS:
        return {}, {"kind": target}, Path.cwd()
    file = Path(target).expanduser()
    if not file.is_file() and file.suffix == "":  # the name of a run file without its suffix
        for suffix in (".yaml", ".yml"):
            if file.with_suffix(suffix).is_file():
                file = file.with_suffix(suffix)
                break
    run_fields, target_fields = read_run_file(file)
    for name in (*_PROGRAM_FIELDS, *_PATH_FIELDS):  # they belong to the file's own program, which is not used
        run_fields.pop(name, None)
    return run_fields, target_fields, file.absolute().parent


def _run_fields(of_file: Mapping[str, Any], of_call: Mapping[str, Any], here: Path) -> dict[str, Any]:
    """Merge the fields of a run file and those of the call, which win.

    Relative paths of the call start from the folder ``here``.

    Raises:
        BadInputError: The call gives a program, or ``env`` is no mapping.
    """
    for name in _PROGRAM_FIELDS:
        if name in of_call:
            fix = "Call the function with its arguments: launch(function, 1, 2)"
            raise BadInputError("the program is the function", field=name, fix=fix)
    env = of_call.get("env") or {}
    if not isinstance(env, Mapping):
        raise BadInputError("a mapping is needed", field="env", fix="Write it as {'NAME': 'value'}")
    run = {"output": None, **of_file, **of_call}  # without an output, no model is kept
    for name in _PATH_FIELDS:
        path = of_call.get(name)
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).strip():
            text = os.fspath(path)
            if MISTYPED_URL.match(text):  # a URL that lost a slash is no path: validation refuses it
                run[name] = text
            else:
                run[name] = absolute(text, here, name)
    # The default for Accelerator() in the function; the field env can set another one.
    precision_env = {"ACCELERATE_MIXED_PRECISION": "bf16"} if run.get("dtype") == "bf16" else {}
    run["env"] = {**precision_env, **(of_file.get("env") or {}), **env}
    return run


def _run_and_return(ctx: RunContext, display: CellDisplay, run_id: str) -> Any:
    """Do a whole run, and return what rank 0 returned.

    An error after the training has what rank 0 returned as attribute ``returned``.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
    returned = Returned(
        f"What is left of the run is kept for a time in {ctx.where}: run_id={run_id!r} reads it again; "
        f"`{ctx.deletion}` deletes it"
    )

    def read_returned(handle: Handle) -> bool:
        """Read what rank 0 returned before the clean-up deletes it; False if its file must be kept."""
        result = ctx.driver.observed_of(ctx, handle).result
        return returned.read(result, partial(ctx.driver.read_returned, ctx, handle))

    try:
        _run(ctx, display, read_returned)
    except BaseException as error:
        returned.add_to(error)
        raise
    return returned.value()


def _run(ctx: RunContext, display: CellDisplay, read_returned: Callable[[Handle], bool]) -> None:
    """Do a whole run, and raise errors in the form that a cell should show.

    If the user interrupted the cell, that is a KeyboardInterrupt. If a rank failed, the message is the whole
    traceback of that rank.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
    try:
        with letting_go_after_errors(ctx):  # after an error, the notebook still runs, but must keep no lease
            run_all(ctx, display, read_returned)
    except CancelledError as ended:
        if isinstance(ended.__cause__, KeyboardInterrupt):  # as Jupyter shows an interrupted cell
            raise KeyboardInterrupt(str(ended)) from None
        raise
    except TrainingFailedError as error:
        failure = display.failure()
        if failure is None:
            raise error from None
        rank, host, trace = failure  # the whole traceback instead of its last lines
        raise TrainingFailedError(f"rank {rank} on {host} failed:\n\n{trace}", field=error.field) from None


def _refuse_unknown(fields: Mapping[str, Any], called: Callable[..., Any]) -> None:
    """Raise BadInputError if a name in ``fields`` is neither an argument of ``called`` nor a run's field.

    ``called`` is the function ``launch`` or ``notebook_launcher``.
    """
    own_arguments = [name for name in inspect.signature(called).parameters if name != "fields"]
    known = {*own_arguments, *TrainingRun.model_fields, "run_id"}  # notebook_launcher passes on run_id
    for name in fields:
        if name not in known:
            all_arguments = f"It takes {', '.join(own_arguments)}, and the fields of a run"
            fix = did_you_mean(name, known) or all_arguments
            raise BadInputError("there is no such argument", field=name, fix=fix)


def _refuse_other_nodes(node_rank: int, master_addr: str, num_nodes: int | None, target: AnyTarget) -> None:
    """Raise BadInputError if this call is for another node, or for several nodes without a target.

    Accelerate is called once on each node, with ``node_rank`` and ``master_addr``. Here one call starts all
    nodes, and ``target`` says where they are.
    """
    one_call = "One call suffices: it starts every node itself. Leave it out, and name the nodes in target="
    if node_rank != 0:
        raise BadInputError(f"this would be node {node_rank}", field="node_rank", fix=one_call)
    try:  # a socket can bind an address of this machine only
        family, socket_type, _, _, address = socket.getaddrinfo(master_addr, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket_type) as test_socket:
            test_socket.bind(address)
    except OSError:
        message = f"{master_addr} is not this machine"
        raise BadInputError(message, field="master_addr", fix=one_call) from None
    if num_nodes not in (None, 1) and target is None:
        fix = "Say where they are: target='cluster.yaml', with the target baremetal or kubernetes in it"
        raise BadInputError(f"{num_nodes} nodes were asked for, and no target", field="num_nodes", fix=fix)


def _dtype(mixed_precision: str | None) -> dict[str, str]:
    """Translate ``mixed_precision`` to the field ``dtype`` of a run; empty: it was not given."""
    if mixed_precision is None:
        return {}
    precision = str(mixed_precision).lower()
    if precision not in _DTYPES:
        fix = "Take 'no' or 'bf16'"
        raise BadInputError(f"CPUs train in no {mixed_precision!r}", field="mixed_precision", fix=fix)
    if precision == "fp16":
        _say("mixed_precision 'fp16' becomes 'bf16': CPUs have no fp16 to train in")
    return {"dtype": _DTYPES[precision]}


def _connect_ranks_once(target: AnyTarget, run: Mapping[str, Any]) -> None:
    """Connect all ranks once before the training, as Accelerate's debug mode does; raise if that fails.

    Raises:
        BadInputError: A field of the run or the target is wrong.
        ManycpuError: The ranks could not connect; the training was not started.
    """
    _say(f"{_DEBUG_VARIABLE}: all ranks meet once before the training")
    try:
        facts = launch(meet, target=target, **run)
    except BadInputError:  # of a field: it says nothing about the environment
        raise
    except ManycpuError as error:
        raise ManycpuError(
            f"an issue was found when verifying the environment: {error}",
            fix="The training was not started. Mend the environment of the ranks, and call again",
        ) from None
    hosts = ", ".join(facts["hosts"])
    _say(f"{_DEBUG_VARIABLE}: {facts['world']} ranks on {hosts} added up their numbers by {facts['backend']}")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - as Accelerate does, into the cell
