"""What preflight reports about a cluster, before anything is started."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.space import Space
from kubernetes import client
from support.waiting import until

from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.targets import open_run
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image.checks import RIGHTS, check_images

Fields = dict[str, Any]
Findings = Iterator[Finding]


def found(target: Fields, tmp_path: Path, **run: Any) -> dict[str, str]:
    """Run the preflight checks of the cluster; return field -> message of each fatal finding."""
    fields = {"program": "question_answering", "output": str(tmp_path / "out")} | run
    ctx = open_run.open_context(fields, target, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    return {finding.field: finding.message for finding in preflight.findings(ctx) if finding.fatal}


def test_a_namespace_with_the_documented_rights_is_ready(target: Fields, tmp_path: Path) -> None:
    assert found(target, tmp_path) == {}


def take_away(where: Space, file: Path, verb: str, resource: str) -> None:
    """Remove one right from a Role."""
    role = yaml.safe_load(file.read_text())
    single = [
        {"apiGroups": rule["apiGroups"], "resources": [one], "verbs": [does]}
        for rule in role["rules"]
        for one, does in product(rule["resources"], rule["verbs"])
    ]
    rules = [rule for rule in single if (rule["verbs"], rule["resources"]) != ([verb], [resource])]
    assert len(rules) == len(single) - 1
    api = client.RbacAuthorizationV1Api(where.admin)
    api.patch_namespaced_role(role["metadata"]["name"], where.name, {"rules": rules})


# tests/unit/test_kubernetes_rights.py covers every right; these tests cover the answers of a real cluster.
@pytest.mark.parametrize(("verb", "resource"), [("create", "pods/exec"), ("patch", "pytorchjobs")])
def test_a_right_that_is_missing_is_named(
    verb: str, resource: str, target: Fields, namespace: Space, tmp_path: Path
) -> None:
    run = {"program": "question_answering", "output": "out"}
    ctx = open_run.open_context(run, target, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    take_away(namespace, preflight.RIGHTS, verb, resource)
    is_missing(ctx, preflight.missing_rights, f"{verb} {resource} in namespace {namespace.name}")


def test_a_right_to_build_that_is_missing_is_named(target: Fields, builds: Space, tmp_path: Path) -> None:
    run = {"program": "question_answering", "output": "out"}
    where = {**target, "image": None, "build_namespace": builds.name}
    ctx = open_run.open_context(run, where, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    assert [finding for finding in check_images(ctx) if finding.fatal] == []
    take_away(builds, RIGHTS, "get", "pods/log")
    is_missing(ctx, check_images, f"get pods/log in namespace {builds.name}")


@pytest.mark.pod_security("restricted")
def test_a_level_that_refuses_the_builder_is_a_warning(
    target: Fields, namespace: Space, builds: Space, tmp_path: Path
) -> None:
    run = {"program": "question_answering", "output": "out"}
    for builder, where, level in (("pod", namespace, "baseline"), ("buildkit", builds, "privileged")):
        fields = {**target, "image": None, "builder": builder, "build_namespace": where.name}
        ctx = open_run.open_context(run, fields, "test", base=tmp_path)
        assert is_on_kubernetes(ctx)
        (finding,) = check_images(ctx)
        assert (finding.field, finding.fatal) == ("target.build_namespace", False)
        assert "violates PodSecurity" in finding.message
        assert finding.fix.endswith(f"level {level}")


def is_missing(ctx: ClusterContext, check: Callable[[ClusterContext], Findings], right: str) -> None:
    """Check that exactly this right is reported missing, as soon as the API server has seen its removal."""

    def named() -> list[str]:
        return [finding.message for finding in check(ctx) if finding.fatal]

    until(lambda: named() == [f"this account may not {right}"])


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"namespace": "nowhere"}, "target.connection", "in namespace nowhere"),
        ({"claim": "missing"}, "target.claim", "there is no claim 'missing'"),
        ({"claim_access": "ReadWriteOnce"}, "target.claim_access", "which one can mount"),
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
