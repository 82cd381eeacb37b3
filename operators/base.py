"""What all operators share: they validate a run and a target, open the run, and call a verb.

A model in a DAG file is valid when it is parsed and cannot be rendered, so the operators keep dictionaries:
templates are rendered first and validated after, inside ``execute``.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow.sdk import BaseOperator

from manycpu.operators.access import access_of
from manycpu.operators.link import TrainingLink
from manycpu.operators.masking import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from airflow.sdk import Context
    from airflow.sdk.definitions.xcom_arg import XComArg

    from manycpu.pipeline.spec.targets import Target
    from manycpu.pipeline.spec.training_run import TrainingRun
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["RunOperator", "airflow_instance", "demand_instance", "explained", "plain", "require_begun"]

_LOOPBACK = ("://localhost", "://127.0.0.1", "://0.0.0.0", "://[::1]")
# Names that say nothing outside of the network they are used in.
_INSIDE = (".local", ".localhost", ".localdomain", ".internal", ".svc", ".lan")
_TENTH = 10  # per cent of a transfer between two lines in the log
_WORTH_TELLING = 100 << 20  # bytes: less is there before anybody asks


class RunOperator(BaseOperator):
    """The base of all operators: ``run`` and ``target`` are template fields.

    Args:
        training: Name of the training that this task is a part of. Tasks of a DAG that give the same name are
            one run, expanded ones each with those of the same map index. None: a run of the task's own.
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
        self.run = plain(run)
        self.target = plain(target)

    def pre_execute(self, context: Any) -> None:
        """Have the link to the training's page from the start on: Airflow itself stores it at the end."""
        super().pre_execute(context)
        instance = context["ti"]
        for link in self.operator_extra_links:
            instance.xcom_push(link.xcom_key, link.get_link(self, ti_key=instance))

    def _do_render_template_fields(
        self, parent: Any, template_fields: Iterable[str], *how: Any, **more: Any
    ) -> None:
        """Render, and mask what is secret before Airflow keeps what was rendered; of expanded tasks, too."""
        super()._do_render_template_fields(parent, template_fields, *how, **more)
        mask(*(getattr(parent, name, None) for name in template_fields))

    def open(self, context: Context, name: str | None = None) -> RunContext:
        """Validate the rendered run and target, and open the run.

        Args:
            context: The task's.
            name: Name of the run that this is; None: the one that ``training`` says.

        Raises:
            BadInputError: A field is wrong, or nothing tells this Airflow's runs from another one's.
            ClusterError: The cluster does not answer.
        """
        from manycpu.pipeline.spec.naming import key_of, run_key
        from manycpu.pipeline.targets.open_run import open_context
        from manycpu.pipeline.targets.runs import find

        identity = self._identity(context)
        key = key_of(name) if name else run_key(*identity)
        run, target = self._fields(context, key)
        mask(run, target)
        demand_instance(target)
        ctx = open_context(run, target, *identity, base=self._base(), access=access_of(target))
        dag = {"dag_id": context["ti"].dag_id, "run_id": context["ti"].run_id}
        return find(replace(ctx, task=_task(context), dag=dag, key=key, name=name or ctx.name))

    def transferred(self) -> Callable[[int, int], None]:
        """Make a callback that logs every tenth of a transfer."""
        logged = 0

        def listen(done: int, total: int) -> None:
            nonlocal logged
            tenths = _TENTH * done // total if total else 0
            if tenths > logged and total > _WORTH_TELLING:
                logged = tenths
                self.log.info("%d %% of %d MiB", tenths * 100 // _TENTH, total >> 20)

        return listen

    def _identity(self, context: Context) -> tuple[object, ...]:
        """Return what tells this task's run from every other."""
        instance = context["ti"]
        own = (self.training,) if self.training else ("task", self.task_id)
        return (airflow_instance(), instance.dag_id, instance.run_id, *own, instance.map_index)

    def _fields(self, context: Context, key: str) -> tuple[Any, Any]:
        if self.run is not None:
            return self.run, self.target
        from manycpu.operators.params import read_params

        declared = context["dag"].params
        run, target = read_params(context["params"], declared, context["run_id"], key)
        return run, target if self.target is None else self.target

    def _base(self) -> Path:
        file = getattr(self.get_dag(), "fileloc", None)
        return Path(file).parent if file else Path.cwd()


def plain(model: Any) -> Any:
    """Turn a model into the dictionary of the fields that were set; other values stay as they are."""
    if not hasattr(model, "model_dump"):
        return model
    fields: dict[str, Any] = model.model_dump(mode="json", exclude_unset=True)
    # A target's kind tells which it is, also where nobody had to write it.
    return fields | {"kind": model.kind} if hasattr(model, "kind") else fields


def airflow_instance() -> str:
    """Return a name that tells this Airflow from others, the same on every worker.

    The option ``[manycpu] instance``; else ``[api] base_url`` where that is more than loopback; else
    Airflow's home.
    """
    from airflow.sdk.configuration import conf

    url = conf.get("api", "base_url", fallback="") or ""
    shared = url if url and not any(host in url for host in _LOOPBACK) else ""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()
    return str(conf.get("manycpu", "instance", fallback="") or shared or home)


def require_begun(ctx: RunContext) -> RunContext:
    """Raise unless the run has begun.

    Raises:
        BadInputError: It has not, or is cleaned up.
    """
    from manycpu.pipeline.spec.errors import BadInputError

    if not ctx.ledger.exists():
        raise BadInputError(
            f"run {ctx.name} has not begun, or is cleaned up: nothing of it is in {ctx.where}",
            field="training",
            fix="Have a PrepareOperator of the same training go before. A run stays where it began: in "
            "another namespace or directory it is another run",
        )
    return ctx


def demand_instance(target: Any) -> None:
    """Raise where another Airflow could take this one's runs for its own, on a target that both reach."""
    from airflow.sdk.configuration import conf

    from manycpu.pipeline.spec.errors import BadInputError

    shared = isinstance(target, dict) and target.get("kind", "local") != "local"
    instance = conf.get("manycpu", "instance", fallback="") or _public(
        conf.get("api", "base_url", fallback="")
    )
    if shared and not instance:
        raise BadInputError(
            "nothing tells this Airflow from others that train there: one with the same DAG would take over "
            "its jobs",
            field="[manycpu] instance",
            fix="Set AIRFLOW__MANYCPU__INSTANCE to a name that no other Airflow has, the same on every "
            "worker; or [api] base_url to its public address",
        )


def _public(url: str | None) -> bool:
    """Whether a URL means the same everywhere.

    >>> [_public(url) for url in ("http://localhost:8080", "http://airflow:8080", "https://airflow.example.org")]
    [False, False, True]
    """
    host = urlsplit(url or "").hostname or ""
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith(_INSIDE)


def _task(context: Context) -> str:
    return f"task {context['ti'].task_id} of DAG {context['ti'].dag_id}"


@contextmanager
def explained() -> Iterator[None]:
    """Fail the task without a retry on errors that a retry would meet again.

    Raises:
        AirflowFailException: Bad input; with its field and what to do.
    """
    from airflow.sdk.exceptions import AirflowFailException

    from manycpu.pipeline.spec.errors import BadInputError, CancelledError

    try:
        yield
    except (BadInputError, CancelledError) as error:
        raise AirflowFailException(str(error)) from error
