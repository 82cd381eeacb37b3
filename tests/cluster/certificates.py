"""The cluster's certificate authority, and the credentials of each client of the API server."""

from pathlib import Path

import trustme
import yaml
from cluster.settings import ADDRESS, API, API_SERVICE, DOMAIN, INNER, NODES, run_folder

API_SERVER_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    f"kubernetes.default.svc.{DOMAIN}",
)
FRONT_PROXY = "front-proxy"
# Name of a kubeconfig -> user and group. Kubernetes has RBAC rules for all of them except dns.
USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "dns": ("manycpu:dns", ""),
}


def folder() -> Path:
    return run_folder() / "pki"


def inner(name: str) -> str:
    """Return the path of a certificate or key file, as the cluster's processes see it."""
    return str(INNER / "pki" / name)


def create() -> None:
    """Create a new authority, and issue all certificates and kubeconfigs."""
    folder().mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder() / "ca.crt"))
    _write_key("ca.key", authority.private_key_pem)
    _issue(
        authority, "apiserver", "kube-apiserver", names=("127.0.0.1", ADDRESS, API_SERVICE, *API_SERVER_NAMES)
    )
    _issue(authority, "kubelet-client", "kubelet-client", "system:masters")
    _issue(authority, "service-accounts", "service-accounts")
    _issue_front_proxy()
    for user, (name, group) in USERS.items():
        _kubeconfig(user, _issue(authority, user, name, group))
    for node in NODES:
        cert = _issue(
            authority, node.name, f"system:node:{node.name}", "system:nodes", (node.name, node.address)
        )
        _kubeconfig(node.name, cert)


def _issue_front_proxy() -> None:
    """Issue the API server's client certificate for the servers of aggregated APIs.

    A server of an aggregated API trusts the user name in the headers of a request with this certificate.
    """
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder() / "front-proxy-ca.crt"))
    _issue(authority, "front-proxy", FRONT_PROXY)


def _issue(
    authority: trustme.CA, file: str, name: str, group: str = "", names: tuple[str, ...] = ("localhost",)
) -> trustme.LeafCert:
    """Issue a certificate for a user and a group, or for host names; write it and its key to ``file``.*."""
    cert = authority.issue_cert(*names, common_name=name, organization_name=group or None)
    cert.cert_chain_pems[0].write_to_path(str(folder() / f"{file}.crt"))
    _write_key(f"{file}.key", cert.private_key_pem)
    return cert


def _write_key(file: str, key: trustme.Blob) -> None:
    path = folder() / file
    path.touch(mode=0o600)
    key.write_to_path(str(path))


def _kubeconfig(user: str, cert: trustme.LeafCert) -> None:
    credentials = {
        "client-certificate-data": _base64(cert.cert_chain_pems[0]),
        "client-key-data": _base64(cert.private_key_pem),
    }
    write_kubeconfig(run_folder() / f"{user}.kubeconfig", user, credentials)


def _base64(blob: trustme.Blob) -> str:
    from base64 import b64encode

    return b64encode(blob.bytes()).decode()


def write_kubeconfig(path: Path, user: str, credentials: dict[str, str], namespace: str = "default") -> None:
    """Write a kubeconfig for this cluster with one user's credentials."""
    from base64 import b64encode

    authority = b64encode((folder() / "ca.crt").read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "manycpu", "cluster": {"server": API, "certificate-authority-data": authority}}
        ],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": user, "context": {"cluster": "manycpu", "user": user, "namespace": namespace}}],
        "current-context": user,
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
