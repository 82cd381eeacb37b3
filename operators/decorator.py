"""``@task.manycpu``: a task that runs a function of the DAG file on n nodes."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
from airflow.sdk import BaseOperator
from airflow.sdk.bases.decorator import DecoratedOperator, _TaskDecorator
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from manycpu.operators.base import RunOperator, fields_of
from manycpu.operators.train import RETRY_DELAY, WholeRunOperator
from manycpu.pipeline.functions.program import script_name
from manycpu.pipeline.functions.source import function_module
from manycpu.pipeline.spec.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from airflow.sdk import Context

    from manycpu.pipeline.targets.context import RunContext

PLACES: Final = ("data", "model", "output", "checkpoints")
"""Parameters of a function that are fields of the run too: the function gets the paths on its node."""
_OPERATOR_OPTIONS: Final = (
    {*inspect.signature(BaseOperator).parameters, "target", "deferrable"} - {"resources"}  # a field of runs
)
_USE_A_FILE: Final = "For more than that, write a file and give its path as `data`"
_TEMPLATE: Final = re.compile(r"{{|{%|{#")
_BRACE_OF_PLACEHOLDER: Final = re.compile(r"\{(?=\s*\w)")  # not the brace of a JSON mapping: a quote follows


class FunctionOperator(DecoratedOperator, WholeRunOperator):
    """Train with a function: a whole run in one task, which returns what the function returns on rank 0.

    Args:
        python_callable: The function.
        run: Fields of the run, without ``program`` and ``args``.
        target: Where to train; None: this machine.
        op_args: Arguments of the function.
        op_kwargs: Arguments of the function by name.
        kwargs: ``deferrable``, and what every operator of Airflow takes.

    Raises:
        BadInputError: The function cannot run in ranks, or a field without templates is wrong.
    """

    custom_operator_name = "@task.manycpu"
    template_fields = (*DecoratedOperator.template_fields, *RunOperator.template_fields)
    template_fields_renderers = {  # noqa: RUF012 - as Airflow declares it
        **DecoratedOperator.template_fields_renderers,
        **RunOperator.template_fields_renderers,
    }

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        run: Mapping[str, Any] | None = None,
        target: Any = None,
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # `_Call` adds the paths that the decorator gives to this copy of op_kwargs.
        call = _Call(python_callable, tuple(op_args or ()), dict(op_kwargs or {}), dict(run or {}))
        _check_when_parsed(call, fields_of(target))
        super().__init__(
            python_callable=python_callable,
            op_args=call.args,
            op_kwargs=call.kwargs,
            run=call.run,
            target=target,
            **kwargs,
        )

    def stage_and_build_if_needed(self, ctx: RunContext) -> tuple[Any, Any]:
        """Write the function's module as the program, stage and build as for any run, delete the module."""
        # Made now, not when the operator is made: then, the lines of the DAG file below it have not run yet.
        module = function_module(self.python_callable, KNOWN_CONTEXT_KEYS)
        program = Path(ctx.run.program)
        module.write(program)
        try:
            return super().stage_and_build_if_needed(ctx)
        finally:
            shutil.rmtree(program.parent, ignore_errors=True)

    def _fields(self, context: Context, key: str) -> tuple[Any, Any]:  # noqa: ARG002 - others need it
        """Return the fields of the run, with the function's module as program, and those of the target."""
        from manycpu.pipeline.targets.context import home

        call = _Call(self.python_callable, tuple(self.op_args), dict(self.op_kwargs), self.run)
        program = home() / "functions" / key / script_name(self.python_callable)
        return {**call.fields, "program": str(program), "args": [call.arguments_as_json()]}, self.target


class _Call:
    """A call of the decorated function, and the fields of the run that makes it.

    Arguments with a name in ``PLACES`` are fields of the run as well.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its arguments by name. This mapping is changed: paths that only the decorator gives are added.
        run: Fields of the run, as the decorator gives them.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: dict[str, Any]
    ) -> None:
        signature = inspect.signature(function)
        self.function, self.args, self.kwargs, self.run = function, args, kwargs, run
        # The function's parameters that are fields of the run: paths or URLs.
        self.places = [name for name in PLACES if name in signature.parameters]
        arguments_of_call = signature.bind_partial(*args, **kwargs).arguments  # a mapped task has more later
        # The call's value wins over the decorator's, and that one over the function's default.
        # Checkpoints are passed even as None: a run has a folder for them in any case.
        for name in self.places:
            if name not in arguments_of_call and (run.get(name) is not None or name == "checkpoints"):
                kwargs[name] = run.get(name)
        self._arguments = signature.bind_partial(*args, **kwargs).arguments
        # The values of these parameters; a default of None does not count.
        self._paths: dict[str, Any] = {}
        for name in self.places:
            value = self._arguments.get(name, signature.parameters[name].default)
            if name in self._arguments or value not in (None, inspect.Parameter.empty):
                self._paths[name] = os.fspath(value) if isinstance(value, os.PathLike) else value

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the run, without its program; paths from the call win over the decorator's."""
        return {"output": None, **self.run, **self._paths}

    def arguments_as_json(self, *, templates: bool = False) -> str:
        """Return the function's arguments as JSON: the only argument of the program.

        Paths of ``places`` are left out: each rank fills in the path on its node.

        Args:
            templates: Whether results of other tasks, which are not known yet, are allowed: they become null.

        Raises:
            BadInputError: The arguments cannot be written as JSON, or take more than 32 KiB.
        """
        from manycpu.pipeline.spec.events import JSON_LIMIT

        # A place whose value is None is an argument like any other. Only checkpoints is always a path: a run
        # has a folder for them in any case.
        filled_by_rank = [
            name for name in self.places if self._paths.get(name) is not None or name == "checkpoints"
        ]
        arguments = {name: value for name, value in self._arguments.items() if name not in filled_by_rank}
        field = self.function.__name__
        for key in _keys_that_are_no_text(arguments):
            fix = f"Use texts as keys, and convert them inside the function. {_USE_A_FILE}"
            fault = f"its arguments are no JSON: a mapping has the key {key!r}, which would arrive as a text"
            raise BadInputError(fault, field=field, fix=fix)

        def as_json_value(value: Any) -> Any:
            """Convert a value that ``json`` does not support; raise TypeError if that is not possible."""
            if templates and hasattr(value, "resolve"):  # an XComArg, whose value is not known yet
                return None
            if isinstance(value, os.PathLike):
                return os.fspath(value)
            is_binary = isinstance(value, bytes | bytearray | memoryview)
            if isinstance(value, Sequence) and not is_binary:  # the results of an expanded task
                return list(value)
            raise TypeError(f"there is a {type(value).__name__} among them")

        try:
            text = json.dumps({"arguments": arguments, "places": filled_by_rank}, default=as_json_value)
        except (TypeError, ValueError) as error:
            fix = f"Give numbers, texts, lists and mappings. {_USE_A_FILE}"
            raise BadInputError(f"its arguments are no JSON: {error}", field=field, fix=fix) from error
        if len(text) > JSON_LIMIT:
            message = f"its arguments take {len(text):,} bytes of JSON, and {JSON_LIMIT:,} can be passed on"
            raise BadInputError(message, field=field, fix=_USE_A_FILE)
        return _BRACE_OF_PLACEHOLDER.sub(r"\\u007b", text)  # run.args would replace a {name} in it


class FunctionTask(_TaskDecorator[Any, Any, FunctionOperator]):
    """A decorated function with options of the run and the operator; a call of it makes a task."""

    def override(self, **options: Any) -> FunctionTask:
        """Return a copy with these options of the operator and fields of the run; others stay unchanged."""
        run, operator_options = _split_options(options)
        return cast("FunctionTask", super().override(run={**self.kwargs["run"], **run}, **operator_options))

    def _expand(self, expand_input: Any, *, strict: bool) -> Any:
        """Check the task, and then map it over inputs, as Airflow's ``expand`` does.

        Airflow creates the operators of a mapped task only when the task runs. Their checks would come too
        late to show an error when the DAG file is parsed.
        """
        # A copy: _Call adds the arguments that the decorator gives.
        keyword_arguments = dict(self.kwargs.get("op_kwargs") or {})
        call = _Call(self.function, args=(), kwargs=keyword_arguments, run=self.kwargs["run"])
        _check_when_parsed(call, fields_of(self.kwargs.get("target")))
        task: Any = super()._expand(expand_input, strict=strict)
        for name, value in (("retries", 1), ("retry_delay", RETRY_DELAY)):
            # The defaults of WholeRunOperator.__init__, which a mapped task does not read.
            task.operator.partial_kwargs.setdefault(name, value)
        return task


def manycpu_task(
    python_callable: Callable[..., Any] | None = None,
    *,
    multiple_outputs: bool | None = None,
    **options: Any,
) -> Any:
    """Make a function a task that trains on n nodes: ``@task.manycpu(nnodes=2, nproc_per_node=2)``.

    Every rank calls the function. What rank 0 returns is the task's result: JSON of at most 32 KiB.
    Parameters named ``data``, ``model``, ``output`` and ``checkpoints`` are fields of the run: a caller gives
    a path or URL, the function gets the path on its node. Other arguments are sent as JSON of 32 KiB at most.

    Args:
        python_callable: The function, if the decorator has no options.
        multiple_outputs: Whether each key of a returned mapping becomes a result by itself.
        options: Fields of the run except ``program`` and ``args``; ``output`` is None by default. Also
            ``target``, ``deferrable``, ``retries`` (1 by default) and what every operator takes.
    """
    if python_callable is not None and not callable(python_callable):
        raise TypeError("options of @task.manycpu have names, such as nnodes=2")
    run, operator_options = _split_options(options)
    # NOTHING: Airflow infers multiple_outputs from the function's return annotation.
    several_outputs: Any = attrs.NOTHING if multiple_outputs is None else multiple_outputs

    def decorate(function: Callable[..., Any]) -> FunctionTask:
        """Wrap a function: each call of the result makes a task."""
        if not hasattr(function, "__annotations__"):  # such as a partial, on which Airflow would fail
            function_module(function, KNOWN_CONTEXT_KEYS)  # raises an error that explains why first
        return FunctionTask(
            function=function,
            operator_class=FunctionOperator,
            multiple_outputs=several_outputs,
            kwargs={"run": run, **operator_options},
            decorator_name="task.manycpu",
        )

    return decorate if python_callable is None else decorate(python_callable)


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into fields of the run and arguments of the operator, in this order.

    An unknown option counts as a field: the check of the fields refuses it later.
    """
    # Airflow's own code passes options that begin with an underscore.
    operator_names = {name for name in options if name in _OPERATOR_OPTIONS or name.startswith("_")}
    run = {name: fields_of(value) for name, value in options.items() if name not in operator_names}
    return run, {name: options[name] for name in operator_names}


def _check_when_parsed(call: _Call, target: Any) -> None:
    """Check at parse time the function, its arguments, and the fields of run and target without templates.

    Raises:
        BadInputError: The function cannot run in ranks, or an argument or a field is wrong.
    """
    from manycpu.pipeline.spec.validation import read_run, read_target

    function_module(call.function, KNOWN_CONTEXT_KEYS)
    if forbidden := [name for name in ("program", "code", "args") if name in call.run]:
        fix = "Leave it out; the arguments of the call are those of the program"
        raise BadInputError("the function is the program", field=f"run.{forbidden[0]}", fix=fix)
    if isinstance(target, str) and not _has_templates(target):
        fix = f"Write it as {{'kind': {target!r}, ...}}, or as Local(...), BareMetal(...) or Kubernetes(...)"
        raise BadInputError("a target is a mapping of its fields", field="target", fix=fix)
    known_fields = {name: value for name, value in call.fields.items() if not _has_templates(value)}
    known_fields.setdefault("output", "known later")  # any valid text: a template gives the value later
    # The function's name stands for the program, whose file is written only when the task runs.
    read_run({**known_fields, "program": call.function.__name__})
    if not _has_templates(target):
        read_target(target)
    call.arguments_as_json(templates=True)  # raises if the arguments are no JSON, or too long


def _has_templates(value: Any) -> bool:
    """Whether a value, or a part of it, is known only later: a template, or the result of another task."""
    if isinstance(value, str):
        return _TEMPLATE.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_templates(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_templates(item) for item in value)
    return hasattr(value, "resolve")  # an XComArg


def _keys_that_are_no_text(value: Any) -> Iterator[Any]:
    """Yield the keys, at any depth, that are not of type str.

    JSON would turn the key 1 into "1", and the same mapping may have that key too.
    """
    values: Iterable[Any] = ()
    if isinstance(value, Mapping):
        yield from (key for key in value if not isinstance(key, str))
        values = value.values()
    elif isinstance(value, list | tuple):
        values = value
    for nested_value in values:
        yield from _keys_that_are_no_text(nested_value)
