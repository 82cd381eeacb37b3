"""``@task.manycpu``: a function of a DAG file that trains on n nodes."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
from airflow.sdk import BaseOperator
from airflow.sdk.bases.decorator import DecoratedOperator, _TaskDecorator
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from manycpu.operators.base import RunOperator, plain
from manycpu.operators.function_source import FunctionModule, function_module
from manycpu.operators.whole_run import RETRY_DELAY, WholeRunOperator

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from airflow.sdk import Context

    from manycpu.pipeline.targets.context import RunContext

__all__ = ["FunctionOperator", "manycpu_task"]

PLACES: Final = ("data", "model", "output", "checkpoints")
"""Parameters of a function that are fields of the run: inside it, they are where the run has that."""
_OF_OPERATORS: Final = {*inspect.signature(BaseOperator).parameters, "target", "deferrable"} - {"resources"}
_MORE: Final = "For more than that, write a file and give its path as `data`"
_TEMPLATE: Final = re.compile(r"{{|{%|{#")
_IN_TEXT: Final = re.compile(r"\{(?=\s*\w)")  # in JSON, where a brace of its own is followed by a quote


class FunctionOperator(DecoratedOperator, WholeRunOperator):
    """Train with a function: a whole run in one task, whose result is what the function returns on rank 0.

    Args:
        python_callable: The function.
        run: Fields of the run, without ``program`` and ``args``.
        target: Where to train; None: this machine.
        op_args: What the function is called with.
        op_kwargs: The same by name.
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
        call = _Call(python_callable, tuple(op_args or ()), dict(op_kwargs or {}), dict(run or {}))
        _checked(call, plain(target))
        super().__init__(
            python_callable=python_callable,
            op_args=call.args,
            op_kwargs=call.kwargs,
            run=call.run,
            target=target,
            **kwargs,
        )

    def staged_and_built(self, ctx: RunContext) -> tuple[Any, Any]:
        """Prepare, stage, and build of the function's module, which exists for as long as that takes."""
        # As it is now that the whole file is read: what stands below the task's call counts as well.
        module = function_module(self.python_callable, KNOWN_CONTEXT_KEYS)
        with _written(Path(ctx.run.program), module):
            return super().staged_and_built(ctx)

    def _fields(self, context: Context, key: str) -> tuple[Any, Any]:  # noqa: ARG002 - others need it
        from manycpu.pipeline.targets.context import home

        call = _Call(self.python_callable, tuple(self.op_args), dict(self.op_kwargs), self.run)
        # As no module is named: its folder comes first where ranks import.
        program = home() / "functions" / key / f"{self.python_callable.__name__}-function.py"
        return {**call.fields, "program": str(program), "args": [call.argument()]}, self.target


class _Call:
    """A call of a function, with the fields of the run that it is given in."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: dict[str, Any]
    ) -> None:
        signature = inspect.signature(function)
        self.function, self.args, self.kwargs, self.run = function, args, kwargs, run
        self.places = [name for name in PLACES if name in signature.parameters]
        bound = signature.bind_partial(*args, **kwargs).arguments
        # What the call gives wins over the decorator, and that over the function's default.
        left = {name: run.get(name) for name in self.places if name not in bound}
        kwargs |= {name: value for name, value in left.items() if value is not None or name == "checkpoints"}
        self._given = signature.bind_partial(*args, **kwargs).arguments
        values = {name: self._given.get(name, signature.parameters[name].default) for name in self.places}
        self._paths = {
            name: _path(value)
            for name, value in values.items()
            if value not in (None, inspect.Parameter.empty)
        }

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the run, without its program."""
        return {"output": None, **self.run, **self._paths}

    def argument(self, *, templates: bool = False) -> str:
        """Write the arguments as the program's one: paths are known where the ranks are.

        Args:
            templates: Whether there may be values that are known later.

        Raises:
            BadInputError: They are not JSON, or more than 32 KiB of it.
        """
        from manycpu.pipeline.spec.errors import BadInputError
        from manycpu.pipeline.spec.events import RETURN_LIMIT

        places = [name for name in self.places if name in self._paths or name == "checkpoints"]
        arguments = {name: value for name, value in self._given.items() if name not in places}
        field = self.function.__name__
        if key := _key_that_is_no_text(arguments):
            fix = f"Have texts as keys, and turn them into what they stand for inside the function. {_MORE}"
            what = (
                f"its arguments are no JSON: a mapping has the key {key[0]!r}, which would arrive as a text"
            )
            raise BadInputError(what, field=field, fix=fix)
        try:
            text = json.dumps(
                {"arguments": arguments, "places": places}, default=partial(_plain, templates=templates)
            )
        except (TypeError, ValueError) as error:
            fix = f"Give numbers, texts, lists and mappings. {_MORE}"
            raise BadInputError(f"its arguments are no JSON: {error}", field=field, fix=fix) from error
        if len(text) > RETURN_LIMIT:
            message = f"its arguments take {len(text):,} bytes of JSON, and {RETURN_LIMIT:,} can be passed on"
            raise BadInputError(message, field=field, fix=_MORE)
        return _IN_TEXT.sub(r"\\u007b", text)  # no placeholder of run.args


class FunctionTask(_TaskDecorator[Any, Any, FunctionOperator]):
    """A decorated function: called, it is a task; its options are those of the run and of the operator."""

    def override(self, **options: Any) -> FunctionTask:
        """Change options: fields of the run each by itself."""
        run, others = _sorted(options)
        return cast("FunctionTask", super().override(run={**self.kwargs["run"], **run}, **others))

    def _expand(self, expand_input: Any, *, strict: bool) -> Any:
        # Airflow makes operators of a mapped task when it runs: what is wrong is to be known before.
        given = dict(self.kwargs.get("op_kwargs") or {})
        call = _Call(self.function, (), given, self.kwargs["run"])
        _checked(call, plain(self.kwargs.get("target")))
        task: Any = super()._expand(expand_input, strict=strict)
        for name, value in (("retries", 1), ("retry_delay", RETRY_DELAY)):
            task.operator.partial_kwargs.setdefault(name, value)  # as the operator itself would have it
        return task


def manycpu_task(
    python_callable: Callable[..., Any] | None = None,
    *,
    multiple_outputs: bool | None = None,
    **options: Any,
) -> Any:
    """Make a function a task that trains on n nodes: ``@task.manycpu(nnodes=2, nproc_per_node=2)``.

    Every rank calls the function; what rank 0 returns is the task's result: JSON, at most 32 KiB of it.
    Parameters named ``data``, ``model``, ``output`` and ``checkpoints`` are fields of the run: a caller gives
    a path or URL, the function gets the path on its node. Other arguments travel as JSON, at most 32 KiB.

    Args:
        python_callable: The function, where the decorator stands without options.
        multiple_outputs: Whether a mapping that is returned becomes a result for each of its names.
        options: Fields of the run, but for ``program`` and ``args``; ``output`` is None by default. And
            ``target``, ``deferrable``, ``retries`` (1 by default) and what every operator takes.
    """
    if python_callable is not None and not callable(python_callable):
        raise TypeError("options of @task.manycpu have names, such as nnodes=2")
    run, others = _sorted(options)
    several: Any = attrs.NOTHING if multiple_outputs is None else multiple_outputs

    def decorate(function: Callable[..., Any]) -> FunctionTask:
        return FunctionTask(
            function=function,
            operator_class=FunctionOperator,
            multiple_outputs=several,
            kwargs={"run": run, **others},
            decorator_name="task.manycpu",
        )

    return decorate if python_callable is None else decorate(python_callable)


def _sorted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell fields of the run from what the operator takes; what is neither is named as a wrong field."""
    own = {name for name in options if name in _OF_OPERATORS or name.startswith("_")}
    run = {name: plain(value) for name, value in options.items() if name not in own}
    return run, {name: options[name] for name in own}


def _checked(call: _Call, target: Any) -> None:
    """Check what can be known when the DAG file is read.

    Raises:
        BadInputError: The function cannot run in ranks, or a field without templates is wrong.
    """
    from manycpu.pipeline.spec.errors import BadInputError
    from manycpu.pipeline.spec.validation import read_run, read_target

    function_module(call.function, KNOWN_CONTEXT_KEYS)
    if wrong := [name for name in ("program", "code", "args") if name in call.run]:
        fix = "Leave it out; what the function is called with are its arguments"
        raise BadInputError("the function is the program", field=f"run.{wrong[0]}", fix=fix)
    if isinstance(target, str) and not _has_templates(target):
        fix = f"Write it as {{'kind': {target!r}, ...}}, or as Kubernetes(...), which names its fields"
        raise BadInputError("a target is a mapping of its fields", field="target", fix=fix)
    known = {name: value for name, value in call.fields.items() if not _has_templates(value)}
    known.setdefault("output", "known later")  # there will be one
    read_run({**known, "program": call.function.__name__})
    if not _has_templates(target):
        read_target(target)
    call.argument(templates=True)


def _has_templates(value: Any) -> bool:
    if isinstance(value, str):
        return _TEMPLATE.search(value) is not None
    if isinstance(value, Mapping):
        return any(map(_has_templates, value.values()))
    return any(map(_has_templates, value)) if isinstance(value, list | tuple) else hasattr(value, "resolve")


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _key_that_is_no_text(value: Any) -> tuple[Any] | None:
    """Find a key of a mapping that JSON would turn into a text, where it may meet another one."""
    if isinstance(value, Mapping):
        own = next(((key,) for key in value if not isinstance(key, str)), None)
        return own or next(filter(None, map(_key_that_is_no_text, value.values())), None)
    if isinstance(value, list | tuple):
        return next(filter(None, map(_key_that_is_no_text, value)), None)
    return None


def _plain(value: Any, *, templates: bool) -> Any:
    """Write in plain words what JSON does not know: paths, and the results of expanded tasks."""
    if templates and hasattr(value, "resolve"):
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"there is a {type(value).__name__} among them")


@contextmanager
def _written(program: Path, module: FunctionModule) -> Iterator[None]:
    """Have a program in a folder of its own, whatever the repositories around it ignore."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.with_name(".gitignore").write_text("!*\n")
    module.write(program)
    try:
        yield
    finally:
        shutil.rmtree(program.parent, ignore_errors=True)
