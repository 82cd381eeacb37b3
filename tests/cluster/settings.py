"""Addresses, names and folders of the test cluster, all defined here.

All are constants, except the cache folder, which the environment may set.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The only network that the machine shares with the cluster: a veth pair, machine .2, cluster .1.
INTERFACE: Final = "manycpu0"
MACHINE_ADDRESS: Final = "10.203.0.2"
ADDRESS: Final = "10.203.0.1"
PREFIX: Final = 30

# Networks that only exist inside the cluster's network namespace.
PODS: Final = "10.203.0.0/16"
SERVICES: Final = "10.204.0.0/16"
API_SERVICE: Final = "10.204.0.1"
DOMAIN: Final = "cluster.local"

API: Final = f"https://{ADDRESS}:6443"
REGISTRY: Final = f"{ADDRESS}:5000"

CGROUP: Final = "manycpu"

# The run folder as the cluster's processes see it. It is short: a unix socket's path has at most 107 bytes.
INNER: Final = Path("/run/manycpu")
# Each node has its own folders in place of these folders of the machine.
PRIVATE: Final = ("/var/lib", "/var/log")
# Where kube-controller-manager's host-path provisioner creates volumes (fixed in its source).
VOLUMES: Final = Path("/tmp/hostpath_pv")  # noqa: S108 - a private mount of the cluster, not the machine's /tmp

HERE: Final = Path(__file__).parent
PROJECT: Final = HERE.parent.parent


@dataclass(frozen=True)
class Node:
    """One node: its name, and the number that decides its pod network."""

    name: str
    number: int

    @property
    def subnet(self) -> str:
        return f"10.203.{self.number}.0/24"

    @property
    def address(self) -> str:
        return f"10.203.{self.number}.1"

    @property
    def bridge(self) -> str:
        return f"pods-{self.number}"

    @property
    def folder(self) -> Path:
        """The node's folder as the node's processes see it."""
        return INNER / self.name

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"


NODES: Final = (Node("node-a", 1), Node("node-b", 2))


def node(name: str) -> Node:
    return next(n for n in NODES if n.name == name)


def registry() -> str:
    """Return the registry with the tests' images: MANYCPU_TEST_REGISTRY, or the cluster's own."""
    return os.environ.get("MANYCPU_TEST_REGISTRY") or REGISTRY


def cache() -> Path:
    """Return the cache folder, the only folder of the machine that the cluster writes to."""
    root = os.environ.get("MANYCPU_CACHE") or "~/.cache/manycpu"
    return Path(root).expanduser().resolve() / "cluster"


def run_folder() -> Path:
    """Return the folder with the files of the running cluster; it is deleted when the cluster goes down."""
    return cache() / "run"


def kubeconfig() -> Path:
    return run_folder() / "admin.kubeconfig"
