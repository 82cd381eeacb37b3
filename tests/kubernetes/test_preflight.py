"""What preflight finds on a cluster, before anything is started."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.space import Space
from helpers import until
from kubernetes import client

from manycpu.pipeline.verbs import context
from manycpu.pipeline.verbs.context import ClusterContext
from manycpu.pipeline.verbs.on_kubernetes import preflight

Fields = dict[str, Any]


def found(target: Fields, tmp_path: Path, **run: Any) -> dict[str, str]:
    """Run the checks of the cluster; field -> message."""
    fields = {"program": "question_answering", "output": str(tmp_path / "out")} | run
    ctx = context.open_context(fields, target, "test", base=tmp_path)
    assert isinstance(ctx, ClusterContext)
    return {finding.field: finding.message for finding in preflight.findings(ctx) if finding.fatal}


def test_a_namespace_with_the_documented_rights_is_ready(target: Fields, tmp_path: Path) -> None:
    assert found(target, tmp_path) == {}


def test_each_right_that_is_missing_is_named(target: Fields, namespace: Space, tmp_path: Path) -> None:
    api = client.RbacAuthorizationV1Api(namespace.admin)
    role = yaml.safe_load(preflight.RIGHTS.read_text())
    name = role["metadata"]["name"]
    for number, rule in enumerate(role["rules"]):
        for verb in rule["verbs"]:
            rules = [dict(other) for other in role["rules"]]
            rules[number]["verbs"] = [other for other in rule["verbs"] if other != verb] or [
                "deletecollection"
            ]
            api.patch_namespaced_role(name, namespace.name, {"rules": rules})
            resource = "pytorchjobs" if "pytorchjobs" in rule["resources"] else rule["resources"][0]
            ctx = context.open_context(
                {"program": "question_answering", "output": "out"}, target, "test", base=tmp_path
            )
            assert isinstance(ctx, ClusterContext)
            messages = [finding.message for finding in preflight.missing_rights(ctx)]
            assert f"this account may not {verb} {resource} in namespace {namespace.name}" in messages


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"namespace": "nowhere"}, "target.connection", "in namespace nowhere"),
        ({"claim": "missing"}, "target.claim", "there is no claim 'missing'"),
        ({"claim_access": "ReadWriteOnce"}, "target.claim_access", "can be mounted by one"),
        ({"priority_class": "vip"}, "target.priority_class", "vip"),
        ({"service_account": "ghost"}, "target.service_account", "ghost"),
    ],
)
def test_what_the_cluster_lacks_is_named_with_its_field(
    changed: Fields, field: str, message: str, target: Fields, tmp_path: Path
) -> None:
    assert message in found(target | changed, tmp_path, nnodes=2)[field]


def test_a_secret_that_is_not_there(target: Fields, tmp_path: Path) -> None:
    assert "'hub-token'" in found(target, tmp_path, env_from=["hub-token"])["run.env_from"]


def test_more_than_a_node_or_the_quota_has(target: Fields, namespace: Space, tmp_path: Path) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "1Gi", "pods": "2"}}}
    core = client.CoreV1Api(namespace.admin)
    core.create_namespaced_resource_quota(namespace.name, quota)
    until(lambda: core.read_namespaced_resource_quota("small", namespace.name).status.hard)
    asked = {"cpu": 0.2, "memory": "600Mi"}
    seen = found(target, tmp_path, nnodes=3, resources=asked)
    assert "'small'" in seen["run.resources.memory"]
    assert "'small'" in seen["run.nnodes"]


def test_a_cluster_that_does_not_answer(target: Fields, tmp_path: Path) -> None:
    config = tmp_path / "config"
    text = Path(target["connection"]).read_text()
    server = yaml.safe_load(text)["clusters"][0]["cluster"]["server"]
    config.write_text(text.replace(server, "https://127.0.0.1:1"))
    config.chmod(0o600)
    seen = found(target | {"connection": str(config)}, tmp_path)
    assert "the API server does not answer" in seen["target.connection"]
