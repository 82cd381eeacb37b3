"""Open a cluster and its registry with Airflow's connections: secrets, which stay in the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from manycpu.pipeline.spec.errors import ClusterError
    from manycpu.pipeline.targets.context import Access

__all__ = ["access_of"]


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
    return Access(
        connect=_connect(cluster) if cluster else None,
        registry_login=_login(registry) if registry else None,
    )


def _connect(connection: str) -> Callable[[], Any]:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    _read(connection, "target.connection")

    # A new hook for each: it keeps the client that it made once, and with it the token.
    def connect() -> Any:
        try:
            return KubernetesHook(conn_id=connection).get_conn()
        except Exception as error:  # Airflow or its secrets backend may be away for a moment
            raise _unread(connection, "target.connection", error) from error

    return connect


def _login(connection: str) -> dict[str, str]:
    credentials = _read(connection, "target.registry_connection")
    return {"username": credentials.login or "", "password": credentials.password or ""}


def _read(connection: str, field: str) -> Any:
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    from manycpu.pipeline.spec.errors import BadInputError

    try:
        return BaseHook.get_connection(connection)
    except AirflowNotFoundException as error:
        fix = "Add it in Airflow under Admin, Connections, or leave the field out"
        raise BadInputError(f"there is no connection {connection!r}", field=field, fix=fix) from error
    except Exception as error:
        raise _unread(connection, field, error) from error


def _unread(connection: str, field: str, error: Exception) -> ClusterError:
    from manycpu.pipeline.spec.errors import ClusterError

    # The type alone: the text of the error may hold secrets.
    return ClusterError(f"connection {connection!r} cannot be read: {type(error).__name__}", field=field)
