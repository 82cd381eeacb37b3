"""The whole cluster: start it, end it, and describe the running one."""

import fcntl
import hashlib
import logging
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from cluster import (
    certificates,
    cgroups,
    control_plane,
    images,
    namespace,
    network,
    node,
    operators,
    preflight,
    programs,
    services,
    storage,
)
from cluster.command import ClusterError, MissingError, log, wait_for
from cluster.modules import Module, chosen
from cluster.namespace import Namespace
from cluster.settings import ADDRESS, HERE, NODES, REGISTRY, cache, kubeconfig, run_folder

READY_SECONDS = 120
# Not in the fingerprint: the cluster does not depend on them. Of modules/, it depends on the chosen ones.
OF_TESTS = {
    "conftest.py",
    "faults.py",
    "fixtures.py",
    "hollow.py",
    "jobs.py",
    "modules",
    "programs_in_pods",
    "space.py",
}


@dataclass(frozen=True)
class Cluster:
    """The running cluster of this machine.

    Attributes:
        namespace: the namespaces of its processes.
        modules: the modules that it was built from, by component.
    """

    namespace: Namespace
    modules: dict[str, Module]

    def kubectl(self, *words: str, stdin: str | None = None, seconds: float = 60) -> str:
        return control_plane.kubectl(self.modules["kubernetes"], *words, stdin=stdin, seconds=seconds)


def fingerprint() -> str:
    """Return a hash of everything that the cluster is made from: versions, configurations, this package."""
    content = hashlib.sha256()
    for file in sorted(f for f in HERE.rglob("*") if f.suffix in {".py", ".toml", ".yaml", ".json", ""}):
        if file.is_file() and not (file.name.startswith("test_") or OF_TESTS & set(file.parts)):
            content.update(file.read_bytes())
    made_from = [*(module.digest() for module in chosen().values()), *(i.reference for i in images.every())]
    content.update(" ".join(made_from).encode())
    return content.hexdigest()


def running() -> Cluster | None:
    """Return the running cluster if it was made from the present files and versions, else None."""
    found = namespace.find()
    if found and _mark().exists() and _mark().read_text() == fingerprint():
        return Cluster(found, chosen())
    return None


def _mark() -> Path:
    """Return the file with the running cluster's fingerprint; it exists once the cluster has started."""
    return run_folder() / "fingerprint"


def up() -> Cluster:
    """Return the running cluster; if there is none of these files and versions, start one.

    First end an outdated cluster, or what a killed start left behind.

    Raises:
        MissingError: this machine cannot run a cluster, or a test session uses the outdated one.
        ClusterError: the cluster did not start; its logs are in the run folder until the next start.
    """
    with lock():
        if cluster := running():
            return cluster
        if namespace.find() and _mark().exists() and _is_in_use():
            raise MissingError(
                "a test session is using the cluster that runs, which was made from other versions or files: "
                "wait until it has ended"
            )
        _down()
        if missing := preflight.missing():
            raise MissingError("; ".join(missing))
        try:
            return _start()
        except BaseException:
            _end()  # the run folder with the logs stays until the next start
            raise


def _start() -> Cluster:
    with _step("programs"):
        modules = programs.ensure()
    # Meanwhile, remove Go's sources, which takes minutes on a slow disk.
    with ThreadPoolExecutor(1) as beside:
        forgotten = beside.submit(programs.forget_sources)
        cluster = _start_with(modules)
        forgotten.result()
    _mark().write_text(fingerprint())
    return cluster


def _start_with(modules: dict[str, Module]) -> Cluster:
    with _step("namespace, network, certificates"):
        shutil.rmtree(run_folder(), ignore_errors=True)
        inside = namespace.create()
        cgroups.create()
        network.create(inside)
        certificates.create()
    cluster = Cluster(inside, modules)
    with _step("registry and images"):
        services.start_registry(inside)
        images.ensure(inside)
    with _step("control plane"):
        control_plane.start(inside, modules["kubernetes"])
        cluster.kubectl("apply", "--validate=false", "--filename", str(HERE / "manifests"))
        services.start_proxy(inside, modules["kubernetes"])
        services.start_dns(inside, modules["coredns"])
    with _step("nodes"):
        for each in NODES:
            node.start(inside, each, modules["kubernetes"])
        wait_for("both nodes to be ready", lambda: _nodes_ready(cluster), seconds=READY_SECONDS)
    with _step("storage, operators"):
        storage.create(inside, cluster.kubectl)
        operators.install(cluster.kubectl, modules)
    return cluster


def _nodes_ready(cluster: Cluster) -> bool:
    words = 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
    try:
        return cluster.kubectl("get", "nodes", "--output", words).split() == ["True"] * len(NODES)
    except ClusterError:
        return False


def down() -> bool:
    """End the cluster and remove everything that it left behind. Return whether there was a cluster."""
    with lock():
        return _down()


def down_unless_used() -> bool:
    """End the cluster, unless another test session uses it. Return whether there was a cluster to end."""
    with lock():
        return not _is_in_use() and _down()


def _down() -> bool:
    there = run_folder().exists()
    _end()
    shutil.rmtree(run_folder(), ignore_errors=True)
    return there


def _end() -> None:
    found = namespace.find()
    if found:
        namespace.end(found)
    if found or run_folder().exists():
        network.remove()
    cgroups.remove()


def describe(cluster: Cluster) -> str:
    """Return a summary of the running cluster for people: kubeconfig, registry, nodes, versions, memory."""
    versions = ", ".join(f"{module.component} {module.minor}" for module in cluster.modules.values())
    processes = namespace.processes(cluster.namespace)
    return "\n".join(
        (
            f"export KUBECONFIG={kubeconfig()}",
            f"registry  {REGISTRY} (plain HTTP), images {', '.join(images.names())}",
            f"nodes     {', '.join(f'{n.name} (pods in {n.subnet})' for n in NODES)}; API, DNS at {ADDRESS}",
            f"versions  {versions}",
            f"storage   {', '.join(storage.CLASSES)}",
            f"memory    {memory(cluster) / 2**20:.0f} MiB in {len(processes)} processes",
            f"kubectl   {cluster.modules['kubernetes'].program('kubectl')}",
        )
    )


def memory(cluster: Cluster) -> int:
    """Return the memory of the cluster's processes in bytes, pods included; shared memory counts once."""
    return sum(_memory(process) for process in namespace.processes(cluster.namespace))


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:  # the process ended while others were counted
        return 0


@contextmanager
def lock() -> Iterator[None]:
    """Hold the lock that lets one process at a time start or stop the cluster."""
    with _held("lock", fcntl.LOCK_EX):
        yield


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Use the cluster for one test, alone or beside other tests; turns are in order of arrival."""
    with ExitStack() as stack:
        with _held("next-turn", fcntl.LOCK_EX):
            stack.enter_context(_held("turn", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def in_use() -> Iterator[None]:
    """Prevent other processes from ending or replacing the running cluster while the block runs."""
    with _held("in-use", fcntl.LOCK_SH):
        yield


def _is_in_use() -> bool:
    try:
        with _held("in-use", fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


@contextmanager
def _held(name: str, how: int) -> Iterator[None]:
    """Hold a lock on a file in the cache folder; `how` are flags of flock, such as LOCK_SH."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / name).open("w") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def _step(name: str) -> Iterator[None]:
    started = time.monotonic()
    log.log(logging.INFO, "%s ...", name)
    yield
    log.log(logging.INFO, "%s: %.1f s", name, time.monotonic() - started)
