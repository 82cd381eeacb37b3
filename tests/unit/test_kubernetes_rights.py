"""Each right that an account lacks is named, and no other."""

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.image import checks

Check = Callable[[Any], Iterator[Finding]]


def cluster_without(verb: str, group: str, resource: str) -> Any:
    """Answer as a cluster does whose account has every right but one."""

    def allowed(asked: str, plural: str, *, group: str = "", subresource: str = "") -> bool:
        return (asked, group, f"{plural}/{subresource}".strip("/")) != lacked

    lacked = (verb, group, resource)
    return SimpleNamespace(allowed=allowed)


TARGETS = [
    *(Kubernetes.model_validate({"namespace": "ml", "launch": launch}) for launch in JOB_KINDS),
    Kubernetes(namespace="ml", queue="team-a"),
    Kubernetes(namespace="ml", queue="team-a", launch="mpijob"),
]


def context(target: Kubernetes, cluster: Any) -> Any:
    return SimpleNamespace(target=target, access=Access(opened={"ml": cluster}))


@pytest.mark.parametrize(
    ("target", "right"), [(target, right) for target in TARGETS for right in preflight.rights(target)]
)
def test_each_right_of_a_run_that_is_missing_is_named(target: Kubernetes, right: preflight.Right) -> None:
    verb, _, resource = right
    ctx = context(target, cluster_without(*right))
    found = [finding.message for finding in preflight.missing_rights(ctx)]
    assert found == [f"this account may not {verb} {resource} in namespace ml"]


def test_rights_to_one_resource_that_are_missing_are_one_finding() -> None:
    ctx = context(TARGETS[0], SimpleNamespace(allowed=lambda *_, **__: False))
    found = [finding.message for finding in preflight.missing_rights(ctx)]
    resources = {(group, resource) for _, group, resource in preflight.rights(TARGETS[0])}
    assert len(found) == len(resources)
    assert "this account may not create, delete, get, list, watch pods in namespace ml" in found


def test_only_the_place_in_a_queue_is_no_reason_to_refuse_a_run() -> None:
    ctx = context(TARGETS[-2], SimpleNamespace(allowed=lambda *_, **__: False))
    found = [finding.message for finding in preflight.missing_rights(ctx) if not finding.fatal]
    assert found == ["this account may not get localqueues/pendingworkloads in namespace ml"]


def finding(field: str, message: str) -> Finding:
    return Finding(field, message, "fix")


def test_what_is_met_of_a_right_that_is_named_is_not_told_again() -> None:
    forbidden = finding("target.namespace", 'pods is forbidden: User "u" cannot create resource "pods" in')
    quota = finding("target", "pods is forbidden: exceeded quota: small")
    named = finding("target.connection", "this account may not create pods in namespace ml")
    assert preflight.without_repetitions([forbidden, named, quota]) == [named, quota]
    assert preflight.without_repetitions([forbidden, quota]) == [forbidden, quota]


def test_a_namespace_that_is_missing_is_told_once() -> None:
    missing = 'POST /api/v1/x: namespaces "ml" not found'
    found = [finding(field, missing) for field in ("target.namespace", "target.runtime", "target")]
    assert preflight.without_repetitions(found) == found[:1]
    assert preflight.without_repetitions(found[1:]) == found[1:]


def test_rights_to_queues_are_asked_for_where_a_run_has_one() -> None:
    *_, queued, queued_mpi = (set(preflight.rights(target)) for target in TARGETS)
    without = set(preflight.rights(TARGETS[0]))
    assert {group for _, group, _ in queued - without} == {"kueue.x-k8s.io", "visibility.kueue.x-k8s.io"}
    assert {("patch", "batch", "jobs/status")} < {*queued_mpi} - queued


def test_each_right_to_build_that_is_missing_is_named() -> None:
    rules = yaml.safe_load(checks.RIGHTS.read_text())["rules"]
    rights = [one for rule in rules for one in product(rule["verbs"], rule["resources"])]
    assert len(rights) > 5
    for verb, resource in rights:
        (finding,) = checks._missing_rights(cluster_without(verb, "", resource), "builds")  # noqa: SLF001 - the loop
        assert finding.message == f"this account may not {verb} {resource} in namespace builds"
