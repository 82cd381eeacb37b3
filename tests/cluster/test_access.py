"""The rights of the tests' account, what admission refuses, and the dump of a failed test."""

import pytest
from cluster import jobs
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes import client
from kubernetes.client import ApiException


def test_the_account_has_the_rights_of_its_namespace_and_no_others(namespace: Space) -> None:
    assert namespace.pods() == []
    for forbidden in (
        lambda: namespace.core.list_namespaced_pod("kube-system"),
        namespace.core.list_node,
        lambda: client.RbacAuthorizationV1Api(namespace.user).list_namespaced_role(namespace.name),
    ):
        with pytest.raises(ApiException, match="Forbidden"):
            forbidden()


def test_the_webhook_of_the_training_operator_refuses_a_wrong_job(
    cluster: TestCluster, namespace: Space
) -> None:
    wrong = jobs.pytorchjob("wrong", cluster.image("base"))
    wrong["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"] = (
        "not-pytorch"
    )
    with pytest.raises(ApiException, match="admission webhook"):
        namespace.create(wrong)


@pytest.mark.pod_security("restricted")
def test_pod_security_is_enforced_where_a_test_asks_for_it(cluster: TestCluster, namespace: Space) -> None:
    with pytest.raises(ApiException, match=r"violates PodSecurity \W+restricted"):
        namespace.create(jobs.pod("root", cluster.image("base"), "true"))


@pytest.mark.pod_security("restricted")
def test_builds_have_a_namespace_where_root_but_not_the_host_is_allowed(
    cluster: TestCluster, namespace: Space, builds: Space
) -> None:
    assert builds.name != namespace.name
    builds.create(jobs.pod("root", cluster.image("base"), "id", "-un"))
    builds.wait_pod("root", "Succeeded")
    assert builds.log("root") == "root\n"
    privileged = jobs.pod("privileged", cluster.image("base"), "true")
    privileged["spec"]["hostNetwork"] = True
    with pytest.raises(ApiException, match=r"violates PodSecurity \W+baseline"):
        builds.create(privileged)


def test_a_dump_has_pods_events_and_logs(cluster: TestCluster, namespace: Space) -> None:
    namespace.create(jobs.pod("talker", cluster.image("base"), "echo", "these words"))
    namespace.wait_pod("talker", "Succeeded")
    dump = namespace.dump()
    assert "talker Succeeded on " in dump
    assert "Scheduled Pod/talker" in dump
    assert "log of talker/main:\nthese words" in dump


@pytest.mark.parametrize(("image", "megabytes"), [("helper", 150), ("torch", 1500)])
def test_images_are_small(image: str, megabytes: int, cluster: TestCluster, namespace: Space) -> None:
    from cluster import registry

    name, _, tag = cluster.image(image).rpartition("/")[2].partition(":")
    assert registry.size(name, tag) < megabytes * 1e6
    check = (
        "import importlib.util as u; print([m for m in ('pydantic', 'fsspec', 'torch') if u.find_spec(m)])"
    )
    namespace.create(jobs.pod("check", cluster.image(image), "python3", "-c", check))
    namespace.wait_pod("check", "Succeeded")
    assert ("'torch'" in namespace.log("check")) == (image == "torch")
    assert "'pydantic', 'fsspec'" in namespace.log("check")
