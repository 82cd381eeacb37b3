"""One node: a mount namespace with a containerd and a kubelet, and a pod network.

`start` creates the mounts and starts containerd and kubelet, in that order.
"""

from pathlib import Path

import psutil
from cluster import configs, debian, image_store, images
from cluster.certificates import inner
from cluster.command import ClusterError, wait_for
from cluster.init import PRIVATE_FOLDER
from cluster.modules import Module
from cluster.namespace import Namespace, node_holder
from cluster.settings import ADDRESS, CGROUP, DOMAIN, INNER, NODES, PRIVATE, REGISTRY, Node, cache, run_folder

# Last number of the first pod's address on a node; the bridge and tests use lower numbers.
FIRST_POD = 10


def start(namespace: Namespace, node: Node, kubernetes: Module) -> None:
    """Start a node. Its kubelet registers it with the API server."""
    image_store.link(run_folder() / node.name / "root")
    _configure(node)
    mounts(namespace, node)
    start_containerd(namespace, node)
    start_kubelet(namespace, node, kubernetes)


def _configure(node: Node) -> None:
    folder = run_folder() / node.name
    configure_containerd(node, node.folder / "root")
    first_pod = node.subnet.replace(".0/24", f".{FIRST_POD}")
    configs.write(
        "pod-network.json",
        folder / "cni" / "10-pods.conflist",
        bridge=node.bridge,
        subnet=node.subnet,
        first_pod=first_pod,
        folder=node.folder,
    )
    configs.write(
        "kubelet.yaml",
        folder / "kubelet.yaml",
        name=node.name,
        address=node.address,
        cgroup=CGROUP,
        ca=inner("ca.crt"),
        certificate=inner(f"{node.name}.crt"),
        key=inner(f"{node.name}.key"),
        socket=node.socket,
        dns=ADDRESS,
        domain=DOMAIN,
        folder=node.folder,
        reserved_memory=psutil.virtual_memory().total * (len(NODES) - 1) // len(NODES),
    )


def configure_containerd(node: Node, root: Path) -> None:
    """Write the configuration of a containerd that keeps its images in `root`."""
    folder = run_folder() / node.name
    configs.write("registry-hosts.toml", folder / "registries" / REGISTRY / "hosts.toml", registry=REGISTRY)
    configs.write(
        "containerd.toml",
        folder / "containerd.toml",
        root=root,
        folder=node.folder,
        socket=node.socket,
        pause=images.reference("pause"),
        cni_plugins=debian.cni_plugins(),
    )


def mounts(namespace: Namespace, node: Node) -> None:
    """Create the node's mount namespace, which an idle process keeps open."""
    # Nodes need their own ones of these folders: kubelet and CNI use fixed paths below them.
    own = "".join(f'sh -c "$0" sh {folder} 755 "$1" && ' for folder in PRIVATE)
    ready = run_folder() / node.name / "mounted"
    ready.unlink(missing_ok=True)
    made = f"mount --make-rprivate / && {own}mount --make-rshared / && touch {node.folder}/{ready.name}"
    script = f"{made} && exec sleep infinity"
    unshare = ["unshare", "--mount", "--propagation", "private"]
    namespace.start(node_holder(node.name), [*unshare, "sh", "-c", script, PRIVATE_FOLDER, cache()])
    # A program that starts in the node before this would use the cluster's mounts, not the node's.
    wait_for(f"the mounts of {node.name}", ready.exists, seconds=30, every=0.02)
    hugetlb = f"/sys/fs/cgroup/hugetlb/{CGROUP}/{node.name}"
    namespace.run("sh", "-c", f"[ ! -d /sys/fs/cgroup/hugetlb ] || mkdir -p {hugetlb}")


def start_containerd(namespace: Namespace, node: Node) -> None:
    name = f"{node.name}-containerd"
    # containerd looks for its shim and for runc on PATH.
    path = f"{debian.unpacked()}/usr/bin:{debian.unpacked()}/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    program = debian.program("containerd")
    namespace.start(
        name, [program, "-c", node.folder / "containerd.toml"], node=node.name, env={"PATH": path}
    )
    try:
        wait_for("containerd to listen", lambda: _listens(namespace, node), seconds=30)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{namespace.log(name)}") from None


def _listens(namespace: Namespace, node: Node) -> bool:
    try:
        return bool(ctr(namespace, node, "version"))
    except ClusterError:
        return False


def ctr(namespace: Namespace, node: Node, *words: str, seconds: float = 60) -> str:
    """Run containerd's command line client on the node, in the containerd namespace that kubelet uses."""
    options = ["--address", str(node.socket), "--namespace", "k8s.io"]
    return namespace.run(debian.program("ctr"), *options, *words, node=node.name, seconds=seconds)


def start_kubelet(namespace: Namespace, node: Node, kubernetes: Module) -> None:
    options = [
        f"--config={node.folder}/kubelet.yaml",
        f"--kubeconfig={INNER}/{node.name}.kubeconfig",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--node-labels=topology.kubernetes.io/zone={node.name}",
        f"--root-dir={node.folder}/kubelet",
        f"--cert-dir={node.folder}/kubelet/pki",
    ]
    namespace.start(f"{node.name}-kubelet", [kubernetes.program("kubelet"), *options], node=node.name)
