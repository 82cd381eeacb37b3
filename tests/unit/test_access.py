"""Airflow's connections, while Airflow cannot be asked for them."""

from typing import Any

import pytest

from manycpu.operators.base import access_of
from manycpu.pipeline.spec.errors import ClusterError

TARGET = {"kind": "kubernetes", "connection": "k8s"}


def _away(*_: Any, **__: Any) -> Any:
    raise RuntimeError("API_SERVER_ERROR")


def test_a_connection_that_cannot_be_read_at_first_is_a_cluster_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("airflow.sdk.BaseHook.get_connection", _away)
    with pytest.raises(ClusterError, match="k8s"):
        access_of(TARGET)


def test_a_connection_that_cannot_be_read_later_is_a_cluster_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow.sdk.BaseHook.get_connection", lambda _: None)
    access = access_of(TARGET)
    assert access is not None
    assert access.connect is not None
    hook = "airflow.providers.cncf.kubernetes.hooks.kubernetes.KubernetesHook.get_conn"
    monkeypatch.setattr(hook, _away)
    with pytest.raises(ClusterError, match="k8s"):
        access.connect()
