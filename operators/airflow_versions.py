"""What differs between the versions of Airflow that manycpu supports: docs/dag.md says what users notice."""

from __future__ import annotations

import inspect
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from airflow import __version__

try:
    from airflow.sdk.configuration import conf
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        AirflowTaskTimeout,
        ParamValidationError,
        TaskDeferralTimeout,
        TaskDeferred,
    )
    from airflow.sdk.plugins_manager import AirflowPlugin

    _IS_3_1 = False
except ImportError:
    from airflow.configuration import conf
    from airflow.exceptions import (  # type: ignore[attr-defined,no-redef]
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        AirflowTaskTimeout,
        ParamValidationError,
        TaskDeferralTimeout,
        TaskDeferred,
    )
    from airflow.plugins_manager import AirflowPlugin  # type: ignore[assignment]

    _IS_3_1 = True

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from pathlib import Path

    from airflow.dag_processing.dagbag import DagBag

__all__ = [
    "CALLS_ON_KILL",
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowPlugin",
    "AirflowSkipException",
    "AirflowTaskTimeout",
    "ParamValidationError",
    "TaskDeferralTimeout",
    "TaskDeferred",
    "approval_timeout",
    "calling_airflow",
    "conf",
    "dag_bag",
]

CALLS_ON_KILL: Final = tuple(int(part) for part in __version__.split(".")[:2]) >= (3, 3)
"""Whether Airflow calls ``on_kill`` of a trigger when a person ends its task."""
_CALL_LOCK: Final = threading.RLock()


@contextmanager
def calling_airflow() -> Iterator[None]:
    """Let any thread of a worker or a triggerer call Airflow inside the block.

    Only Airflow 3.1 needs this. It confuses the answers of two threads that call at the same time: a lock
    lets one thread call at a time. And its triggerer asks asgiref for the event loop that reads answers. On a
    thread that asgiref did not start there is none, and the call would end the triggerer: it is set here.
    """
    if not _IS_3_1:
        yield
        return
    from airflow.sdk.execution_time import task_runner
    from asgiref.sync import SyncToAsync

    with _CALL_LOCK:
        reader = getattr(getattr(task_runner, "SUPERVISOR_COMMS", None), "_async_reader", None)
        if reader is not None:  # in a triggerer
            SyncToAsync.threadlocal.main_event_loop = reader._loop  # noqa: SLF001 - no public name
            SyncToAsync.threadlocal.main_event_loop_pid = os.getpid()
        yield


def dag_bag(folder: Path) -> DagBag:
    """Load the DAGs of a folder."""
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # Airflow 3.1
        from airflow.models.dagbag import DagBag  # type: ignore[no-redef]
    return DagBag(folder)


def approval_timeout(limit: timedelta) -> dict[str, Any]:
    """Return the argument that limits how long an ApprovalOperator waits: its name depends on the version."""
    from airflow.providers.standard.operators.hitl import HITLOperator

    is_known = "response_timeout" in inspect.signature(HITLOperator).parameters  # since version 1.13
    return {"response_timeout" if is_known else "execution_timeout": limit}
