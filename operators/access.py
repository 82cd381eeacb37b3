"""Airflow's connections and secrets: open a cluster and its registry with them, and mask them in logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.pipeline.spec.credentials import secrets_in
from manycpu.pipeline.spec.errors import BadInputError, ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from manycpu.pipeline.targets.context import Access

__all__ = ["access_of", "mask_secrets"]


def mask_secrets(*fields: Any) -> None:
    """Make Airflow mask the secrets in values wherever it logs or shows them, also in tracebacks."""
    from airflow.sdk.log import mask_secret

    for secret in secrets_in(fields):
        mask_secret(secret)


def access_of(target: Any) -> Access | None:
    """Read the connections that a target names; None for targets that need none.

    Args:
        target: The rendered fields of a target.

    Raises:
        BadInputError: There is no such connection.
        ClusterError: It cannot be read at present.
    """
    if not isinstance(target, dict) or target.get("kind") != "kubernetes":
        return None
    from manycpu.pipeline.targets.context import Access

    cluster, registry = target.get("connection"), target.get("registry_connection")
    connect, login = _connector(cluster) if cluster else None, None
    if registry:
        credentials = _read_connection(registry, "target.registry_connection")
        login = {"username": credentials.login or "", "password": credentials.password or ""}
    return Access(connect=connect, registry_login=login)


def _connector(connection: str) -> Callable[[], Any]:
    """Return a function that opens a new API client with a connection."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    _read_connection(connection, "target.connection")

    def connect() -> Any:
        try:
            # A new hook each time: a hook caches its client, and with it a token that expires.
            return KubernetesHook(conn_id=connection).get_conn()
        except Exception as error:  # Airflow or its secrets backend may be unavailable for a moment
            raise _unreadable(connection, "target.connection", error) from error

    return connect


def _read_connection(connection: str, field: str) -> Any:
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        return BaseHook.get_connection(connection)
    except AirflowNotFoundException as error:
        fix = "Add it in Airflow under Admin, Connections, or leave the field out"
        raise BadInputError(f"there is no connection {connection!r}", field=field, fix=fix) from error
    except Exception as error:
        raise _unreadable(connection, field, error) from error


def _unreadable(connection: str, field: str, error: Exception) -> ClusterError:
    # Only the error's type: its text may hold secrets.
    return ClusterError(f"connection {connection!r} cannot be read: {type(error).__name__}", field=field)
