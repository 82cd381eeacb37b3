"""Airflow's connections: what is read of them, also while Airflow cannot be asked."""

import json
from typing import Any

import pytest

from manycpu.operators.base import access_of
from manycpu.pipeline.adapters import storage
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


def test_the_key_of_an_aws_connection_may_be_in_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"aws_access_key_id": "key", "aws_secret_access_key": "hidden", "aws_session_token": "token"}
    monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps({"conn_type": "aws", "extra": extra}))
    options = storage.login_options("storage", "run.data")
    assert options == {"key": "key", "secret": "hidden", "token": "token", "client_kwargs": {}}
