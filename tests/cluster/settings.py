"""Where everything of the test cluster is: addresses, names, folders.

Nothing here is looked up at run time but the cache folder; change an address here and it changes everywhere.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The one network that the machine shares with the cluster: a veth pair, machine .2, cluster .1.
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

# The run folder as the cluster's own processes see it: short, since a unix socket's path has 107 bytes.
INNER: Final = Path("/run/manycpu")
# Folders of the machine that a node does not see, but has of its own.
PRIVATE: Final = ("/var/lib", "/var/log")
# Where kube-controller-manager's host-path provisioner makes volumes (fixed in its source).
VOLUMES: Final = Path("/tmp/hostpath_pv")  # noqa: S108 - a private mount of the cluster's, not the machine's /tmp

HERE: Final = Path(__file__).parent
PROJECT: Final = HERE.parent.parent


@dataclass(frozen=True)
class Node:
    """One node: its name, and the number that gives it its pod network and its ports."""

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
        """The node's folder as its own processes see it."""
        return INNER / self.name

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"


NODES: Final = (Node("node-a", 1), Node("node-b", 2))


def node(name: str) -> Node:
    return next(n for n in NODES if n.name == name)


def registry() -> str:
    """The registry with the tests' images: the cluster's own, or the one given in MANYCPU_TEST_REGISTRY."""
    return os.environ.get("MANYCPU_TEST_REGISTRY") or REGISTRY


def cache() -> Path:
    """The only folder of the machine that the cluster writes to."""
    root = os.environ.get("MANYCPU_CACHE") or "~/.cache/manycpu"
    return Path(root).expanduser().resolve() / "cluster"


def run_folder() -> Path:
    """What belongs to the running cluster; gone when it is down."""
    return cache() / "run"


def kubeconfig() -> Path:
    return run_folder() / "admin.kubeconfig"
