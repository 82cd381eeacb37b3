"""A helper pod that a killed worker left is used again only where it is what is asked for now."""

from pathlib import Path
from typing import Any

import pytest
from support.fake_api_server import ApiServer, Object

from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.context import claim_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image import images
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper
from manycpu.pipeline.targets.open_run import open_context


@pytest.fixture
def cluster(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """Give an API server whose pods run as soon as they are there."""
    put = server.put

    def running(kind: str, made: Object) -> Object:
        return put(kind, made | {"status": {"phase": "Running"}})

    monkeypatch.setattr(server, "put", running)
    monkeypatch.setattr(images, "helper", lambda ctx: ctx.target.helper_image)
    return server


def asked_for(cluster: ApiServer, folder: Path, **asked: Any) -> Helper:
    """Ask for the pod of a run, and wait until it is there."""
    run: dict[str, Any] = {"program": "question_answering", "output": str(folder / "out")}
    target = {"kind": "kubernetes", "namespace": "ml", "helper_image": "registry.example/helper:1"}
    run["env_from"] = asked.pop("env_from", ["hub-token"])
    ctx = open_context(run, target | asked, "a", base=folder, access=Access(connect=cluster.connect))
    assert is_on_kubernetes(ctx)
    helper = Helper(ctx, "stage", claim_of(ctx), lambda *_: None)
    helper.create()
    helper.wait_ready()
    return helper


def ready(cluster: ApiServer, folder: Path, **asked: Any) -> Object:
    """Ask for the pod of a run, wait until it is there, and return it."""
    asked_for(cluster, folder, **asked)
    (pod,) = cluster.objects["Pod"]
    return pod


def test_a_later_pod_of_the_same_name_is_not_deleted(cluster: ApiServer, tmp_path: Path) -> None:
    helper = asked_for(cluster, tmp_path, claim="old")
    cluster.remove("Pod", helper.name)
    later = cluster.put("Pod", {"metadata": {"name": helper.name}})
    helper.delete()
    assert cluster.objects["Pod"] == [later]


@pytest.mark.parametrize(
    "asked",
    [{"claim": "new"}, {"env_from": ["mended"]}, {"helper_image": "registry.example/helper:2"}],
    ids=str,
)
def test_a_pod_that_was_asked_for_otherwise_is_replaced(
    cluster: ApiServer, tmp_path: Path, asked: dict[str, Any]
) -> None:
    left = ready(cluster, tmp_path, claim="old")
    used = ready(cluster, tmp_path, **{"claim": "old", **asked})
    assert cluster.deleted == [f"Pod/{left['metadata']['name']}"]
    assert used["metadata"]["name"] == left["metadata"]["name"]
    assert str(next(iter(asked.values()))).strip("[]") in str(used["spec"])


def test_a_pod_that_is_what_is_asked_for_is_used_again(cluster: ApiServer, tmp_path: Path) -> None:
    left = ready(cluster, tmp_path, claim="old")
    assert ready(cluster, tmp_path, claim="old")["metadata"]["uid"] == left["metadata"]["uid"]
    assert cluster.deleted == []


def test_a_pod_of_a_lost_node_which_never_goes_is_replaced(cluster: ApiServer, tmp_path: Path) -> None:
    left = ready(cluster, tmp_path, claim="old")
    long_ago = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    cluster.put("Pod", left | {"metadata": left["metadata"] | long_ago})
    used = ready(cluster, tmp_path, claim="old")
    assert used["metadata"]["uid"] != left["metadata"]["uid"]
