"""Faults that a test can cause in the project's own cluster.

Faults that have an end are context managers. All faults stay inside the cluster's namespaces.
"""

import functools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import psutil
from cluster import control_plane, namespace, network, node, operators, services, space
from cluster.cluster import Cluster
from cluster.command import wait_for
from cluster.namespace import Namespace
from cluster.operators import Place
from cluster.settings import NODES, VOLUMES
from cluster.settings import node as node_named
from cluster.space import Space
from kubernetes import client

READY_SECONDS = 60
DRAIN_SECONDS = 90
RELEASE_SECONDS = 60
# Longest time for which the API server is slow.
SLOW_SECONDS = 60
FILLER = VOLUMES / ".filled"
# Shell script that fills the volumes: almost all space at once, then the last blocks until a write fails.
FILL = """free=$(df --output=avail -BM "$0" | tail -1 | tr -dc 0-9); fallocate -l "$((free - 64))M" "$1"
cat /dev/zero >>"$1" 2>/dev/null || sync "$1" """


P = ParamSpec("P")
R = TypeVar("R")


def _of_all(fault: Callable[Concatenate["Faults", P], R]) -> Callable[Concatenate["Faults", P], R]:
    """Decorate a fault that strikes all tests: it raises RuntimeError unless the test runs alone."""

    @functools.wraps(fault)
    def caused(self: "Faults", /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.alone:
            raise RuntimeError(f"mark the test with pytest.mark.alone: {fault.__name__} is a fault for all")
        return fault(self, *args, **kwargs)

    return caused


@dataclass(frozen=True)
class Faults:
    """Faults of one running cluster.

    Attributes:
        cluster: the cluster.
        alone: whether the test has the cluster to itself.
    """

    cluster: Cluster
    alone: bool

    @property
    def _inside(self) -> Namespace:
        return self.cluster.namespace

    @_of_all
    @contextmanager
    def kubelet_stopped(self, name: str) -> Iterator[None]:
        """Stop a node's kubelet: its containers still run, but the node becomes NotReady after about 16 s."""
        self._inside.stop(f"{name}-kubelet")
        try:
            yield
        finally:
            node.start_kubelet(self._inside, node_named(name), self.cluster.modules["kubernetes"])
            self._recover(name)

    @_of_all
    @contextmanager
    def kubelet_frozen(self, name: str) -> Iterator[None]:
        """Freeze a node's kubelet: containers still run and may end, but their status is not reported.

        After about 36 s the control plane evicts the node's pods, unless all nodes are lost.
        """
        self._inside.signal(f"{name}-kubelet", signal.SIGSTOP)
        try:
            yield
        finally:
            self._inside.signal(f"{name}-kubelet", signal.SIGCONT)
            self._recover(name)

    def _recover(self, name: str) -> None:
        """Wait until a node is ready again, and the operators, which may have been on it or were evicted."""
        wait_for(f"{name} to be ready again", lambda: self.node_ready(name), seconds=READY_SECONDS)
        operators.wait_ready_again(self.cluster.kubectl)

    def node_ready(self, name: str) -> bool:
        words = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        return self.cluster.kubectl("get", "node", name, "--output", words) == "True"

    @_of_all
    @contextmanager
    def cordoned(self, name: str) -> Iterator[None]:
        """Make a node accept no new pods."""
        self.cluster.kubectl("cordon", name)
        try:
            yield
        finally:
            self.cluster.kubectl("uncordon", name)

    @_of_all
    @contextmanager
    def drained(self, name: str, selector: str = "!control-plane") -> Iterator[None]:
        """Cordon a node, and evict its pods that match the selector: by default all but operators."""
        options = ["--delete-emptydir-data", "--force", "--grace-period=1", f"--pod-selector={selector}"]
        self.cluster.kubectl("drain", name, *options, seconds=DRAIN_SECONDS)
        try:
            yield
        finally:
            self.cluster.kubectl("uncordon", name)

    def kill_container(self, where: Space, pod: str, container: str | None = None) -> None:
        """Send SIGKILL to a container's processes, as the out-of-memory killer does."""
        found = client.CoreV1Api(where.admin).read_namespaced_pod(pod, where.name)
        status = next(s for s in found.status.container_statuses if container in {None, s.name})
        number = status.container_id.removeprefix("containerd://")
        on = node_named(found.spec.node_name)
        node.ctr(self._inside, on, "tasks", "kill", "--signal", "SIGKILL", "--all", number)

    @_of_all
    @contextmanager
    def volumes_full(self) -> Iterator[None]:
        """Fill the file system of all volumes of the cluster."""
        gone = lambda: not self._going()  # noqa: E731
        wait_for("the volumes of earlier tests to be gone", gone, seconds=RELEASE_SECONDS)
        try:
            self._inside.run("sh", "-c", FILL, VOLUMES, FILLER)
            yield
        finally:
            self._inside.run("rm", "-f", FILLER)

    def _going(self) -> list[str]:
        """Return the names of the volumes that are still being deleted, which frees space."""
        volumes = json.loads(self.cluster.kubectl("get", "persistentvolumes", "--output", "json"))["items"]
        deleted = [one for one in volumes if one["spec"]["persistentVolumeReclaimPolicy"] == "Delete"]
        return [one["metadata"]["name"] for one in deleted if one["status"]["phase"] == "Released"]

    def empty_volume(self, where: Space, claim: str) -> None:
        """Delete everything in the volume of a claim."""
        path = Path(self._volume_path(where, claim))
        self._inside.run("find", path, "-mindepth", "1", "-delete")

    def touch(self, where: Space, claim: str, folder: str, name: str) -> None:
        """Create an empty file in every folder of this name in the volume of a claim."""
        path = self._volume_path(where, claim)
        self._inside.run("find", path, "-type", "d", "-name", folder, "-exec", "touch", f"{{}}/{name}", ";")

    def _volume_path(self, where: Space, claim: str) -> str:
        core = client.CoreV1Api(where.admin)
        name = core.read_namespaced_persistent_volume_claim(claim, where.name).spec.volume_name
        spec = core.read_persistent_volume(name).spec
        return str((spec.host_path or spec.local).path)

    @_of_all
    @contextmanager
    def registry_away(self) -> Iterator[None]:
        """Stop the registry: nodes cannot pull images that they do not have."""
        self._inside.stop("registry")
        try:
            yield
        finally:
            services.start_registry(self._inside)

    @_of_all
    @contextmanager
    def pods_cut_off(self, name: str) -> Iterator[None]:
        """Cut the network between a node's pods and everything outside the node; its kubelet has network."""
        network.cut(self._inside, node_named(name))
        try:
            yield
        finally:
            network.mend(self._inside)

    @_of_all
    @contextmanager
    def operator_stopped(self, name: str) -> Iterator[None]:
        """Stop an operator of operators.PLACES: jobs of its kind can be created, but no controller reacts."""
        place = operators.PLACES[name]
        self._scale(place, 0)
        gone = lambda: not operators.pods(self.cluster.kubectl, place)  # noqa: E731
        wait_for(f"{name} to be gone", gone, seconds=READY_SECONDS)
        try:
            yield
        finally:
            self._scale(place, 1)
            operators.wait_ready(self.cluster.kubectl, name)

    def _scale(self, place: Place, replicas: int) -> None:
        words = ("scale", f"deployment/{place.deployment}", f"--replicas={replicas}")
        self.cluster.kubectl("--namespace", place.namespace, *words)

    @_of_all
    @contextmanager
    def frozen(self, program: str) -> Iterator[list[psutil.Process]]:
        """Freeze all processes of a program, of the control plane or of an operator; yield them."""
        found = [one for one in namespace.processes(self._inside) if _program(one) == program]
        for one in found:
            one.suspend()
        try:
            yield found
        finally:
            for one in found:
                one.resume()
            wait_for("both nodes to be ready", self._all_ready, seconds=READY_SECONDS)
            operators.wait_ready_again(self.cluster.kubectl)

    @_of_all
    @contextmanager
    def api_away(self) -> Iterator[None]:
        """Kill the API server: it refuses new connections, and open ones break."""
        try:
            self._inside.kill("apiserver")
            yield
        finally:
            control_plane.start_api_server(self._inside, self.cluster.modules["kubernetes"])
            # Controllers may wait a minute before they reconnect: a restart is faster.
            control_plane.start_controllers(self._inside, self.cluster.modules["kubernetes"])
            wait_for("both nodes to be ready", self._all_ready, seconds=READY_SECONDS)
            operators.wait_ready_again(self.cluster.kubectl)

    def _all_ready(self) -> bool:
        return all(self.node_ready(each.name) for each in NODES)  # each test handles its own hollow nodes

    @_of_all
    @contextmanager
    def api_slow(self, delay: float) -> Iterator[None]:
        """Freeze the API server for `delay` seconds again and again, for at most SLOW_SECONDS.

        Raises:
            ValueError: the delay is not between 0 and SLOW_SECONDS.
        """
        if not 0 < delay < SLOW_SECONDS:
            raise ValueError(f"delay is {delay} s; more than 0 and less than {SLOW_SECONDS} s can be had")
        script = (
            f"trap 'kill -CONT $0; exit' TERM; for i in $(seq {int(SLOW_SECONDS / delay)}); do "
            f"kill -STOP $0; sleep {delay} & wait; kill -CONT $0; sleep 0.05 & wait; done"
        )
        self._inside.start("api-slow", ["sh", "-c", script, str(self._inside.process("apiserver"))])
        try:
            yield
        finally:
            self._inside.stop("api-slow")
            self._inside.signal("apiserver", signal.SIGCONT)

    def dying_token(self, where: Space) -> tuple[Path, Callable[[], None]]:
        """Return a kubeconfig whose token a test can make expire at once.

        Kubernetes issues no token for less than ten minutes. This token is bound to an object: it expires
        when the object is deleted.

        Returns:
            the kubeconfig, and a function that makes its token expire.
        """
        core = client.CoreV1Api(where.admin)
        bound = core.create_namespaced_secret(where.name, {"metadata": {"generateName": "token-"}}).metadata
        reference = {"apiVersion": "v1", "kind": "Secret", "name": bound.name, "uid": bound.uid}
        path = where.kubeconfig.with_name(bound.name)
        token = space.token(where.admin, where.name, reference)
        space.write_kubeconfig(path, where.kubeconfig, where.name, token)

        def expire() -> None:
            core.delete_namespaced_secret(bound.name, where.name)

        return path, expire


def _program(process: psutil.Process) -> str:
    """Return the name of the program that a process runs; empty: it has ended."""
    try:
        return Path((process.cmdline() or [""])[0]).name
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
