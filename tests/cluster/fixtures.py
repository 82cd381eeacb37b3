"""pytest fixtures: the cluster, a namespace for a test, faults.

A conftest.py imports them with `from cluster.fixtures import *`. The whole session shares one cluster,
however many conftest.py files import the fixtures.
"""

import logging
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from cluster import cluster as own
from cluster import images, settings, space, storage
from cluster.cluster import Cluster
from cluster.command import MissingError, log
from cluster.faults import Faults
from cluster.space import Space
from kubernetes import client

MIN_NODES = 2
SKIP = "MANYCPU_SKIP_CLUSTER"
"""Environment variable: 1 skips all tests that need a cluster."""
POD_SECURITY = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True)
class TestCluster:
    """The cluster that the tests run on.

    Attributes:
        kubeconfig: the administrator's kubeconfig.
        registry: host:port of the registry that has the tests' images.
        nodes: the names of two of its nodes.
        own: the project's own cluster, or None if MANYCPU_TEST_KUBECONFIG names another.
    """

    __test__ = False

    kubeconfig: Path
    registry: str
    nodes: tuple[str, str]
    own: Cluster | None

    def image(self, name: str) -> str:
        """Return the reference by which a pod pulls an image: base, helper or torch."""
        return images.reference(name)


@pytest.fixture(scope="session", name="cluster")
def cluster(request: pytest.FixtureRequest) -> Iterator[TestCluster]:
    """Yield the cluster, and start it if necessary. If this machine cannot run one, end the session.

    MANYCPU_SKIP_CLUSTER=1 skips the tests that need a cluster instead.
    """
    if os.environ.get(SKIP) == "1":
        pytest.skip(f"{SKIP}=1: nothing was proven on a Kubernetes cluster")
    if given := os.environ.get("MANYCPU_TEST_KUBECONFIG"):
        yield _given(request.session, Path(given))
        return
    with _progress(request.config):
        started = own.running() or start(request.session)
    ends = _started_by_tests().exists()  # read now: a test may end the cluster, and this file with it
    first, second = (node.name for node in settings.NODES)
    with own.in_use():
        yield TestCluster(settings.kubeconfig(), settings.REGISTRY, (first, second), started)
    if ends:
        own.down_unless_used()


def _given(session: pytest.Session, kubeconfig: Path) -> TestCluster:
    """Return the cluster of MANYCPU_TEST_KUBECONFIG after a push of the images; end the session if unfit."""
    if "MANYCPU_TEST_REGISTRY" not in os.environ:
        end(session, "MANYCPU_TEST_KUBECONFIG needs MANYCPU_TEST_REGISTRY, a registry it pulls from")
    with space.connect(kubeconfig) as api:
        nodes = [n.metadata.name for n in client.CoreV1Api(api).list_node().items if not n.spec.unschedulable]
    if len(nodes) < MIN_NODES:
        end(
            session,
            f"the cluster of MANYCPU_TEST_KUBECONFIG has {len(nodes)} node that takes pods; two are needed",
        )
    images.publish(images.debian())
    return TestCluster(kubeconfig, settings.registry(), (nodes[0], nodes[1]), None)


def start(session: pytest.Session) -> Cluster:
    """Start the cluster. If this machine lacks something for it, end the session with that reason."""
    try:
        started = own.up()
    except MissingError as error:
        end(session, str(error))
    _started_by_tests().touch()
    return started


def _started_by_tests() -> Path:
    """Return the file that marks a cluster started by tests: the last session ends such a cluster."""
    return settings.run_folder() / "started-by-tests"


def end(session: pytest.Session, why: str) -> NoReturn:
    """Fail the test and end the session: a session that skips all cluster tests must not look successful."""
    reason = f"no Kubernetes cluster here: {why}. Set {SKIP}=1 to do without all tests that need one"
    session.shouldfail = reason
    pytest.fail(reason, pytrace=False)


@contextmanager
def _progress(config: pytest.Config) -> Iterator[None]:
    """Show the progress of the start, which may take minutes."""
    capture = config.pluginmanager.getplugin("capturemanager")
    handler = logging.StreamHandler(sys.__stderr__)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with capture.global_and_fixture_disabled():
            yield
    finally:
        log.removeHandler(handler)


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait until this test may use the cluster; a test marked `alone` waits until no other test uses it."""
    if "cluster" not in request.fixturenames:
        yield
        return
    with own.turn(alone=_is_alone(request)):
        yield


def _is_alone(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("alone") is not None


@pytest.fixture(name="namespace")
def namespace(cluster: TestCluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Space]:
    """Yield a namespace for this test; the report of a failed test shows its pods, events and logs.

    `@pytest.mark.pod_security("restricted")` enforces that Pod Security level in the namespace.
    """
    prefix = request.node.originalname.removeprefix("test_").replace("_", "-").lower()
    marker = request.node.get_closest_marker("pod_security")
    labels = {POD_SECURITY: marker.args[0]} if marker else {}
    with space.create(cluster.kubeconfig, tmp_path, prefix, labels) as made:
        request.node.stash[_SPACES] = [made]
        yield made
        _remove(cluster, made)


@pytest.fixture(name="builds")
def builds(cluster: TestCluster, namespace: Space, request: pytest.FixtureRequest) -> Iterator[Space]:
    """Yield a second namespace, where the test's account builds images: Pod Security level baseline."""
    made = space.beside(namespace, "builds", {POD_SECURITY: "baseline"})
    request.node.stash[_SPACES].append(made)
    yield made
    _remove(cluster, made)


@pytest.fixture(name="second")
def second(cluster: TestCluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Space]:
    """Yield another namespace with its own account, which has no rights in the first."""
    (folder := tmp_path / "second").mkdir()
    with space.create(cluster.kubeconfig, folder, "second") as made:
        request.node.stash.setdefault(_SPACES, []).append(made)
        yield made
        _remove(cluster, made)


def _remove(cluster: TestCluster, made: Space) -> None:
    space.delete(made)
    if cluster.own:
        space.wait_emptied(made)
        with own.lock():  # else this process could empty a volume that another one has just bound again
            storage.recycle(cluster.own.namespace, cluster.own.kubectl)


@pytest.fixture(name="faults")
def faults(cluster: TestCluster, request: pytest.FixtureRequest) -> Faults:
    """Return the faults that a test can cause; only `alone` tests may cause those of the whole cluster.

    Skips the test on another cluster than the project's own.
    """
    if cluster.own is None:
        pytest.skip("faults are caused in the project's own cluster only, not in MANYCPU_TEST_KUBECONFIG")
    return Faults(cluster.own, alone=_is_alone(request))


_SPACES = pytest.StashKey[list[Space]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    spaces = item.stash.get(_SPACES, [])
    if report.failed and report.when == "call" and spaces:
        report.sections += [(f"namespace {made.name}", made.dump()) for made in spaces]
        if there := own.running():
            report.sections.append(("API server", there.namespace.log("apiserver")))
    return report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pod_security(level): the level that the test's namespace enforces")
