"""The base of all operators: validate the rendered run and target, open the run, and explain errors.

A model in a DAG file is validated when the file is parsed, and no template in it can be rendered. Operators
therefore keep dictionaries: Airflow renders their templates first, and ``execute`` validates them after.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow.sdk import BaseOperator, Context, XComArg
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowFailException

from manycpu.operators.access import access_of, mask_secrets
from manycpu.operators.link import TrainingLink
from manycpu.pipeline.spec.errors import BadInputError, CancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from manycpu.pipeline import Target, TrainingRun
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["RunOperator", "airflow_instance", "demand_instance", "explained", "fields_of", "require_begun"]

_LOOPBACK = ("://localhost", "://127.0.0.1", "://0.0.0.0", "://[::1]")
# Endings of host names that are known within one network only.
_PRIVATE_SUFFIXES = (".local", ".localhost", ".localdomain", ".internal", ".svc", ".lan")
_MIN_LOGGED_BYTES = 100 << 20  # smaller transfers end before anybody reads the log


class RunOperator(BaseOperator):
    """The base of all operators: ``run`` and ``target`` are template fields.

    Args:
        training: Name of the training that this task is a part of. Tasks of a DAG with the same name share
            one run; expanded tasks share it with those of the same map index. None: a run of the task's own.
        run: What to train; a model, its fields with templates in them, or the output of another task.
            None: the parameters of the DAG run, as the trigger form of :func:`training_params` asks for them.
        target: Where to train; None where ``run`` is given is this machine.
        kwargs: What every operator of Airflow takes.
    """

    template_fields: Sequence[str] = ("run", "target")
    template_fields_renderers = {"run": "json", "target": "json"}  # noqa: RUF012 - as Airflow declares it
    ui_color = "#e3f0e8"
    operator_extra_links = (TrainingLink(),)

    def __init__(
        self,
        *,
        training: str | None,
        run: TrainingRun | Mapping[str, Any] | XComArg | None = None,
        target: Target | Mapping[str, Any] | XComArg | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.training = training
        self.run = fields_of(run)
        self.target = fields_of(target)

    def pre_execute(self, context: Any) -> None:
        """Store the link to the training's page before the task runs: Airflow stores it only at the end."""
        super().pre_execute(context)
        instance = context["ti"]
        for link in self.operator_extra_links:
            instance.xcom_push(link.xcom_key, link.get_link(self, ti_key=instance))

    def _do_render_template_fields(
        self, parent: Any, template_fields: Iterable[str], *args: Any, **kwargs: Any
    ) -> None:
        """Render, then mask secrets before Airflow stores the rendered fields; also of expanded tasks."""
        super()._do_render_template_fields(parent, template_fields, *args, **kwargs)
        mask_secrets(*(getattr(parent, name, None) for name in template_fields))

    def open(self, context: Context, name: str | None = None) -> RunContext:
        """Validate the rendered run and target, and open the run.

        Args:
            context: The task's.
            name: Name of the run; None: the name is made from ``training``.

        Raises:
            BadInputError: A field is wrong, or this Airflow has no unique name on a shared target.
            ClusterError: The cluster does not answer.
        """
        from manycpu.pipeline.spec.naming import key_of, run_key
        from manycpu.pipeline.targets.open_run import open_context
        from manycpu.pipeline.targets.runs import find

        instance = context["ti"]
        own = (self.training,) if self.training else ("task", self.task_id)
        identity = (airflow_instance(), instance.dag_id, instance.run_id, *own, instance.map_index)
        key = key_of(name) if name else run_key(*identity)
        run, target = self._fields(context, key)
        mask_secrets(run, target)
        demand_instance(target)
        file = getattr(self.get_dag(), "fileloc", None)
        base = Path(file).parent if file else Path.cwd()
        ctx = open_context(run, target, *identity, base=base, access=access_of(target))
        task = f"task {instance.task_id} of DAG {instance.dag_id}"
        dag = {"dag_id": instance.dag_id, "run_id": instance.run_id}
        return find(replace(ctx, task=task, dag=dag, key=key, name=name or ctx.name))

    def transfer_logger(self) -> Callable[[int, int], None]:
        """Return a callback that logs every tenth of a transfer."""
        logged = 0

        def log_progress(done: int, total: int) -> None:
            nonlocal logged
            tenths = 10 * done // total if total else 0
            if tenths > logged and total > _MIN_LOGGED_BYTES:
                logged = tenths
                self.log.info("%d %% of %d MiB", 10 * tenths, total >> 20)

        return log_progress

    def _fields(self, context: Context, key: str) -> tuple[Any, Any]:
        """Return the fields of the run and of the target, from this task or from the DAG run's parameters."""
        if self.run is not None:
            return self.run, self.target
        from manycpu.operators.params import read_params

        declared = context["dag"].params
        run, target = read_params(context["params"], declared, context["run_id"], key)
        return run, target if self.target is None else self.target


def fields_of(model: Any) -> Any:
    """Turn a model into the dictionary of the fields that were set; other values stay as they are."""
    if not hasattr(model, "model_dump"):
        return model
    fields: dict[str, Any] = model.model_dump(mode="json", exclude_unset=True)
    # Readers of the dictionary choose the model by its kind, which a default leaves unset.
    return fields | {"kind": model.kind} if hasattr(model, "kind") else fields


def airflow_instance() -> str:
    """Return a name that tells this Airflow from others, the same on every worker.

    The option ``[manycpu] instance``; else ``[api] base_url`` if that is no loopback address; else
    Airflow's home.
    """
    url = conf.get("api", "base_url", fallback="") or ""
    shared = url if url and not any(host in url for host in _LOOPBACK) else ""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()
    return str(conf.get("manycpu", "instance", fallback="") or shared or home)


def require_begun(ctx: RunContext) -> RunContext:
    """Return the run if it has begun.

    Raises:
        BadInputError: It has not, or is cleaned up.
    """
    if not ctx.ledger.exists():
        raise BadInputError(
            f"run {ctx.name} has not begun, or is cleaned up: {ctx.where} holds nothing of it",
            field="training",
            fix="Put a PrepareOperator of the same training before this task. A run stays where it began: in "
            "another namespace or directory it is another run",
        )
    return ctx


def demand_instance(target: Any) -> None:
    """Refuse a target that several Airflows reach while this Airflow has no unique name.

    Raises:
        BadInputError: Neither ``[manycpu] instance`` nor a public ``[api] base_url`` is set.
    """
    shared = isinstance(target, dict) and target.get("kind", "local") != "local"
    instance = conf.get("manycpu", "instance", fallback="") or _is_public(
        conf.get("api", "base_url", fallback="")
    )
    if shared and not instance:
        raise BadInputError(
            "this Airflow has no unique name: another one with the same DAG would take over its jobs",
            field="[manycpu] instance",
            fix="Set AIRFLOW__MANYCPU__INSTANCE to a name that no other Airflow has, the same on every "
            "worker; or [api] base_url to its public address",
        )


def _is_public(url: str | None) -> bool:
    """Whether a URL leads to the same host from everywhere.

    >>> [_is_public(url) for url in ("http://localhost:8080", "http://airflow:8080", "https://airflow.example.org")]
    [False, False, True]
    """
    host = urlsplit(url or "").hostname or ""
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith(_PRIVATE_SUFFIXES)


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors that a retry would meet again into a failure without retry.

    Raises:
        AirflowFailException: Bad input, or a run that a person cancelled; with its field and what to do.
    """
    try:
        yield
    except (BadInputError, CancelledError) as error:
        raise AirflowFailException(str(error)) from error
