"""The base of all operators: open the rendered run and target with Airflow's connections, and explain errors.

A pydantic model is validated when the DAG file is parsed, before Airflow renders the templates in its fields.
Operators therefore keep dictionaries: Airflow renders their templates, and then ``execute`` validates them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from airflow.sdk import BaseOperator, BaseOperatorLink, Context, XComArg

from manycpu.operators.airflow_versions import (
    AirflowFailException,
    AirflowNotFoundException,
    calling_airflow,
    conf,
)
from manycpu.pipeline.adapters import storage
from manycpu.pipeline.spec.credentials import secrets_in
from manycpu.pipeline.spec.errors import BadInputError, CancelledError, ClusterError, ForeignRunError
from manycpu.pipeline.spec.naming import key_of, run_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from airflow.sdk.types import TaskInstanceKey

    from manycpu.pipeline import Target, TrainingRun
    from manycpu.pipeline.targets.context import Access, RunContext

_UNQUOTED = ":+"  # as in Airflow's own addresses, with which it compares a tab's to mark the open tab
# None: the URL names no host.
_NOT_REACHABLE = frozenset({None, "localhost", "127.0.0.1", "0.0.0.0", "::1"})  # noqa: S104 - compared with
# Endings of host names that are known within one network only.
_PRIVATE_SUFFIXES = (".local", ".localhost", ".localdomain", ".internal", ".svc", ".lan")
_MIN_LOGGED_BYTES = 100 << 20  # smaller transfers end before anybody reads the log


class TrainingLink(BaseOperatorLink):
    """A link to the tab `Training` of the DAG run, with this task's training chosen there."""

    name = "Training"

    @property
    def xcom_key(self) -> str:
        """Name of the XCom that holds the link; the tab finds the tasks of manycpu by it."""
        return "manycpu_link"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the tab's address; ``ti_key`` is the task instance, or its key."""
        # A task without a training has a run of its own, which the tab shows under the task's id.
        training = getattr(operator, "training", None) or operator.task_id
        return tab_of(ti_key.dag_id, ti_key.run_id, training, ti_key.map_index)


def tab_of(dag: str, run: str, training: str, map_index: int | None) -> str:
    """Return the address of a DAG run's tab `Training`, relative to Airflow's base URL: no leading slash.

    ``training`` is the one to show there; ``map_index`` is None or -1 if its task is not expanded.

    >>> tab_of("weekly", "manual__2026-01-01T00:00:00+00:00", "training", None)
    'dags/weekly/runs/manual__2026-01-01T00:00:00+00:00/plugin/training?training=training'
    >>> tab_of("weekly", "a", "fit", 2)
    'dags/weekly/runs/a/plugin/training?training=fit%5B2%5D'
    """
    name = training if map_index in (None, -1) else f"{training}[{map_index}]"
    page = f"dags/{quote(dag, safe=_UNQUOTED)}/runs/{quote(run, safe=_UNQUOTED)}/plugin/training"
    return f"{page}?{urlencode({'training': name})}"


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
        """Render the template fields into ``parent``, and mask their secrets before Airflow stores them.

        Airflow calls this for expanded tasks too. A value that is a model, from an XCom, is replaced by the
        dictionary of its fields.
        """
        super()._do_render_template_fields(parent, template_fields, *args, **kwargs)
        # Only run and target may be models; the fields of subclasses stay as they are.
        for name in {*template_fields} & {*RunOperator.template_fields}:
            setattr(parent, name, fields_of(getattr(parent, name, None)))
        _mask_secrets(*(getattr(parent, name, None) for name in template_fields))

    def open(self, context: Context, name: str | None = None) -> RunContext:
        """Validate the rendered run and target, mask their secrets, and return the run's context.

        Every verb of the run takes this context.

        Args:
            context: Airflow's context of the task.
            name: The name of a run that has begun, such as a handle holds; None: find or make the name by
                the identity of the DAG run and the training.

        Raises:
            BadInputError: A field is wrong.
            ClusterError: The cluster does not answer.
        """
        from manycpu.pipeline.targets.open_run import find, open_context

        instance = context["ti"]
        # The tasks of a training share its run; a task without a training has a run of its own.
        owner = (self.training,) if self.training else ("task", self.task_id)
        airflow = airflow_instance()
        identity = (airflow, instance.dag_id, instance.run_id, *owner, instance.map_index)
        key = key_of(name) if name else run_key(*identity)  # the key is a part of the name
        run, target = self._fields(context, key)
        _mask_secrets(run, target)
        # Relative paths start from the folder of the DAG file.
        dag_file = getattr(self.get_dag(), "fileloc", None)
        base = Path(dag_file).parent if dag_file else Path.cwd()
        ctx = open_context(run, target, *identity, base=base, access=access_of(target))
        task = f"task {instance.task_id} of DAG {instance.dag_id}"
        dag = {"dag_id": instance.dag_id, "run_id": instance.run_id, "instance": airflow}
        if partition := getattr(context["dag_run"], "partition_key", None):  # Airflow 3.1 has no partitions
            dag["partition_key"] = partition
        # An edited field may have changed the name: `find` takes the name with which the run began.
        return find(replace(ctx, task=task, dag=dag, key=key, name=name or ctx.name))

    def transfer_logger(self) -> Callable[[int, int], None]:
        """Return a callback that gets the bytes done and in total, and logs each tenth of a large transfer.

        A transfer of up to 100 MiB is not logged.
        """
        logged_tenths = 0

        def log_progress(done: int, total: int) -> None:
            """Log the share that is done, in whole tenths, unless the same tenth was logged before."""
            nonlocal logged_tenths
            tenths = 10 * done // total if total else 0
            if tenths > logged_tenths and total > _MIN_LOGGED_BYTES:
                logged_tenths = tenths
                self.log.info("%d %% of %d MiB", 10 * tenths, total >> 20)

        return log_progress

    def _fields(self, context: Context, key: str) -> tuple[Any, Any]:
        """Return the fields of the run and those of the target, from this task or the DAG run's parameters.

        ``key`` is the run's key: it is a part of the output's path if the parameters name no output.
        """
        if self.run is not None:
            return self.run, self.target
        from manycpu.operators.params import read_params

        declared = context["dag"].params
        run, target = read_params(context["params"], declared, context["run_id"], key)
        return run, target if self.target is None else self.target


def fields_of(model: Any) -> Any:
    """Return a model's fields that were set, as a dictionary; return other values as they are."""
    if not hasattr(model, "model_dump"):
        return model
    fields: dict[str, Any] = model.model_dump(mode="json", exclude_unset=True)
    # The kind says which model reads the dictionary; a kind that is the model's default counts as not set.
    return fields | {"kind": model.kind} if hasattr(model, "kind") else fields


def access_of(target: Any) -> Access | None:
    """Return the access to a Kubernetes target: Airflow connections to its cluster and its registry.

    ``target`` holds the target's fields, which name the connections. None: the target is of another kind.

    Raises:
        BadInputError: Airflow has no connection of that name.
        ClusterError: The connection cannot be read at present.
    """
    if not isinstance(target, dict) or target.get("kind") != "kubernetes":
        return None
    from manycpu.pipeline.targets.context import Access

    to_cluster, to_registry = target.get("connection"), target.get("registry_connection")
    login = None
    if to_cluster:
        # Only to raise now if it is missing: `_connect` reads it again for each client.
        _read_connection(to_cluster, "target.connection")
    if to_registry:
        credentials = _read_connection(to_registry, "target.registry_connection")
        login = {"username": credentials.login or "", "password": credentials.password or ""}
    return Access(connect=partial(_connect, to_cluster) if to_cluster else None, registry_login=login)


def _connect(connection: str) -> Any:
    """Make a client of the cluster that a connection of Airflow names; raise ClusterError if that fails."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    try:
        # A new hook each time: a hook caches its client, and with it a token that expires.
        with calling_airflow():
            return KubernetesHook(conn_id=connection).get_conn()
    except Exception as error:  # Airflow or its secrets backend may be unavailable for a moment
        raise _unreadable_connection(connection, "target.connection", error) from error


def _s3_options(login: str, field: str) -> dict[str, Any]:
    """Return options for s3fs from the Airflow connection that a URL names, as in ``s3://login@bucket/path``.

    ``login`` is the connection's id. ``field`` is the field with the URL, for errors.

    Raises:
        BadInputError: There is no such connection, it is not of type aws, or it assumes a role.
        ClusterError: The connection cannot be read at present.
    """
    connection = _read_connection(login, field)
    extra = connection.extra_dejson
    assumes_role = bool(extra.get("role_arn"))  # s3fs has no option for a role
    if connection.conn_type != "aws" or assumes_role:
        reason = "assumes a role" if assumes_role else f"is of type {connection.conn_type}"
        fix = "Name a connection of type aws with a key or a profile; for a role, set up a profile"
        if connection.conn_type == "generic" and not assumes_role:
            fix = (
                "`airflow connections add` stores this type where apache-airflow-providers-amazon is not "
                "installed: install it there, or make the connection by the REST API or in the UI"
            )
        raise BadInputError(f"connection {login!r} {reason}", field=field, fix=fix)
    options = {
        "key": connection.login or extra.get("aws_access_key_id"),
        "secret": connection.password or extra.get("aws_secret_access_key"),
        "token": extra.get("aws_session_token"),
        "profile": extra.get("profile_name"),
        "endpoint_url": extra.get("endpoint_url"),
    }
    client_options = {name: extra[name] for name in ("region_name", "verify") if name in extra}
    return {name: value for name, value in options.items() if value} | {"client_kwargs": client_options}


storage.login_options = _s3_options  # without Airflow, a login is the name of a profile


def _read_connection(connection: str, field: str) -> Any:
    """Read a connection of Airflow by its id; errors name ``field``, the field that holds the id.

    Raises:
        BadInputError: There is no such connection.
        ClusterError: The connection cannot be read at present.
    """
    from airflow.sdk import BaseHook

    try:
        with calling_airflow():
            return BaseHook.get_connection(connection)
    except AirflowNotFoundException as error:
        fix = "Add it in Airflow under Admin, Connections, or leave the field out"
        raise BadInputError(f"there is no connection {connection!r}", field=field, fix=fix) from error
    except Exception as error:
        raise _unreadable_connection(connection, field, error) from error


def _unreadable_connection(connection: str, field: str, error: Exception) -> ClusterError:
    """Make the error for a connection that exists, but cannot be read at present."""
    # Only the error's type: its text may hold secrets.
    return ClusterError(f"connection {connection!r} cannot be read: {type(error).__name__}", field=field)


def _mask_secrets(*fields: Any) -> None:
    """Make Airflow mask the secrets in values wherever it logs or shows them, also in tracebacks."""
    from airflow.sdk.log import mask_secret

    for secret in secrets_in(fields):
        mask_secret(secret)


def airflow_instance() -> str:
    """Return the name that distinguishes this Airflow from others; it is the same on every worker.

    It is the option ``[manycpu] instance``. If that is not set, it is ``[api] base_url`` unless that is a
    loopback address, and otherwise the path of Airflow's home.
    """
    url = conf.get("api", "base_url", fallback="") or ""
    reachable_url = url if urlsplit(url).hostname not in _NOT_REACHABLE else ""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()
    return str(conf.get("manycpu", "instance", fallback="") or reachable_url or home)


def require_begun(ctx: RunContext) -> RunContext:
    """Return the run as it is; raise BadInputError if it has not begun, or is cleaned up."""
    if not ctx.ledger.exists():
        raise BadInputError(
            f"run {ctx.name} has not begun, or is cleaned up: {ctx.where} holds nothing of it",
            field="training",
            fix="Put a PrepareOperator of the same training before this task. A run stays where it began: in "
            "another namespace or directory it is another run",
        )
    return ctx


def demand_instance(output: str | None, target_kind: str) -> None:
    """Raise ForeignRunError if other Airflows may reach target or output, and this one has no unique name.

    Only this machine can reach a local target, and an output that is a path. Two Airflows with one name would
    share runs on other targets, and replace each other's models behind URLs.
    """
    is_shared = target_kind != "local" or (output is not None and storage.is_remote(output))
    if not is_shared or conf.get("manycpu", "instance", fallback=""):
        return
    # Without the option, base_url is the name: no other Airflow has it if its host is public.
    host = urlsplit(conf.get("api", "base_url", fallback="") or "").hostname or ""
    try:
        is_public = ip_address(host).is_global
    except ValueError:  # a host name, or none
        is_public = "." in host and not host.endswith(_PRIVATE_SUFFIXES)
    if not is_public:
        raise ForeignRunError(
            "this Airflow has no unique name: another one with the same DAG would take over its jobs, "
            "or replace its models",
            field="[manycpu] instance",
            fix="Set AIRFLOW__MANYCPU__INSTANCE to a name that no other Airflow has, the same on every "
            "worker; or [api] base_url to its public address",
        )


@contextmanager
def failing_without_retry() -> Iterator[None]:
    """Fail the task without a retry if the block raises BadInputError or CancelledError.

    A retry would meet the same error. Other errors pass unchanged.
    """
    try:
        yield
    except (BadInputError, CancelledError) as error:
        raise AirflowFailException(str(error)) from error
