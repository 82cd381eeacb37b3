"""Services for the pods and the machine: service addresses (kube-proxy), DNS, and the image registry."""

import requests
from cluster import configs, debian
from cluster.command import ClusterError, wait_for
from cluster.modules import Module
from cluster.namespace import Namespace
from cluster.settings import ADDRESS, DOMAIN, INNER, NODES, PODS, cache, run_folder


def start_proxy(namespace: Namespace, kubernetes: Module) -> None:
    """Start kube-proxy: one for both nodes, since they share the cluster's network namespace."""
    configs.write(
        "kube-proxy.yaml", run_folder() / "kube-proxy.yaml", folder=INNER, pods=PODS, address=ADDRESS
    )
    options = [f"--config={INNER}/kube-proxy.yaml", f"--hostname-override={NODES[0].name}"]
    namespace.start("proxy", [kubernetes.program("kube-proxy"), *options])


def start_dns(namespace: Namespace, coredns: Module) -> None:
    configs.write("Corefile", run_folder() / "Corefile", address=ADDRESS, domain=DOMAIN, folder=INNER)
    namespace.start("dns", [coredns.program("coredns"), "-conf", f"{INNER}/Corefile"])
    _wait_for(namespace, "dns", f"http://{ADDRESS}:8181/ready")


def start_registry(namespace: Namespace) -> None:
    """Start the registry. Its images stay in the cache when the cluster is down."""
    images = cache() / "registry"
    images.mkdir(parents=True, exist_ok=True)
    configs.write("registry.yaml", run_folder() / "registry.yaml", folder=images, address=ADDRESS)
    namespace.start("registry", [debian.program("docker-registry"), "serve", f"{INNER}/registry.yaml"])
    _wait_for(namespace, "registry", f"http://{ADDRESS}:5000/v2/")


def _wait_for(namespace: Namespace, name: str, url: str) -> None:
    def answers() -> bool:
        try:
            return requests.get(url, timeout=2).ok
        except requests.ConnectionError:
            return False

    try:
        wait_for(f"{name} to answer at {url}", answers, seconds=20)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{namespace.log(name)}") from None
