"""Each right that an account lacks is named, and no other."""

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from manycpu.pipeline.spec.errors import ClusterError, Finding
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.targets import Kubernetes
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


@pytest.mark.parametrize(
    ("target", "right"), [(target, right) for target in TARGETS for right in preflight.rights(target)]
)
def test_each_right_of_a_run_that_is_missing_is_named(target: Kubernetes, right: preflight.Right) -> None:
    verb, _, resource = right
    ctx: Any = SimpleNamespace(target=target, cluster=cluster_without(*right))
    found = [finding.message for finding in preflight.missing_rights(ctx)]
    assert found == [f"this account may not {verb} {resource} in namespace ml"]


def test_rights_to_one_resource_are_named_together_with_where_they_are_listed() -> None:
    target = Kubernetes(namespace="ml")
    cluster = SimpleNamespace(allowed=lambda _, plural, **__: plural != "pods")
    ctx: Any = SimpleNamespace(target=target, cluster=cluster)
    whole, *subresources = preflight.missing_rights(ctx)
    assert whole.message == "this account may not create, delete, get, list, watch pods in namespace ml"
    assert str(preflight.RIGHTS) in whole.fix
    assert all("pods/" in one.message for one in subresources)


class Refusing:
    """A cluster that refuses all that is created."""

    def __init__(self, status: int, message: str) -> None:
        self._error = ClusterError.of_status(status, message)

    def create(self, _: Any, *, dry_run: bool) -> None:
        assert dry_run
        raise self._error


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, 'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods" in ml'),
        (404, 'namespaces "ml" not found'),
    ],
)
def test_what_other_checks_tell_is_not_told_of_the_pods_as_well(status: int, message: str) -> None:
    ctx: Any = SimpleNamespace(cluster=Refusing(status, message))
    assert preflight._refusal(ctx, {}) == ""  # noqa: SLF001 - what each dry run goes by


def test_what_is_forbidden_by_a_quota_is_told() -> None:
    ctx: Any = SimpleNamespace(cluster=Refusing(403, "pods is forbidden: exceeded quota: small"))
    assert "exceeded quota" in preflight._refusal(ctx, {})  # noqa: SLF001 - as above


def test_a_priority_without_a_queue_is_refused() -> None:
    ctx: Any = SimpleNamespace(target=Kubernetes(namespace="ml", queue_priority="high"))
    (finding,) = preflight._queue(ctx)  # noqa: SLF001 - nothing else is asked of the cluster
    assert (finding.field, finding.fatal) == ("target.queue_priority", True)


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
        (finding,) = checks._rights(cluster_without(verb, "", resource), "builds")  # noqa: SLF001 - the loop
        assert finding.message == f"this account may not {verb} {resource} in namespace builds"
