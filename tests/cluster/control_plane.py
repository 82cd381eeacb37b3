"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler, as processes of the cluster."""

from cluster.certificates import FRONT_PROXY, inner
from cluster.command import ClusterError, run, wait_for
from cluster.modules import Module
from cluster.namespace import Namespace
from cluster.settings import ADDRESS, INNER, SERVICES, kubeconfig, run_folder

ETCD = "http://127.0.0.1:2379"
# Until a node counts as lost, and then until its pods are evicted: by default, this takes minutes.
NODE_LOST_SECONDS = 16
EVICTED_AFTER_SECONDS = 20


# Owner of the folders of storage class `shared`, which have mode 0750: pods of this user may write there.
_USER = "1000"
_AS_USER = [
    *("setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--"),
]


def start(namespace: Namespace, kubernetes: Module) -> None:
    """Start the whole control plane and wait until the API server is ready."""
    namespace.start("etcd", [kubernetes.program("server"), *_etcd()])
    start_api_server(namespace, kubernetes)
    start_controllers(namespace, kubernetes)


def start_controllers(namespace: Namespace, kubernetes: Module) -> None:
    """Start the controller-manager and the scheduler; stop running ones first."""
    for name in ("controller-manager", "scheduler"):
        namespace.stop(name)
    namespace.start(
        "controller-manager",
        [*_AS_USER, kubernetes.program("kube-controller-manager"), *_controller_manager()],
    )
    namespace.start("scheduler", [kubernetes.program("kube-scheduler"), *_controller("scheduler")])


def start_api_server(namespace: Namespace, kubernetes: Module) -> None:
    """Start the API server and wait until it answers; if it ends before that, start it again."""

    def answers() -> bool:
        if not namespace.alive("apiserver"):
            namespace.start("apiserver", [kubernetes.program("kube-apiserver"), *_api_server()])
        return ready(kubernetes)

    try:
        wait_for("the API server to be ready", answers, seconds=120)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{namespace.log('apiserver')}") from None


def ready(kubernetes: Module) -> bool:
    try:
        return kubectl(kubernetes, "get", "--raw", "/readyz", seconds=5) == "ok"
    except ClusterError:
        return False


def kubectl(kubernetes: Module, *words: str, stdin: str | None = None, seconds: float = 60) -> str:
    """Run kubectl as the cluster's administrator."""
    # kubectl's cache stays out of ~/.kube.
    options = [f"--kubeconfig={kubeconfig()}", f"--cache-dir={run_folder()}/kubectl"]
    return run([kubernetes.program("kubectl"), *options, *words], stdin=stdin, seconds=seconds)


def _etcd() -> list[str]:
    return [
        f"--data-dir={INNER}/etcd",
        "--unsafe-no-fsync",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
    ]


def _api_server() -> list[str]:
    return [
        f"--etcd-servers={ETCD}",
        f"--bind-address={ADDRESS}",
        f"--advertise-address={ADDRESS}",
        "--secure-port=6443",
        f"--tls-cert-file={inner('apiserver.crt')}",
        f"--tls-private-key-file={inner('apiserver.key')}",
        f"--client-ca-file={inner('ca.crt')}",
        f"--service-account-key-file={inner('service-accounts.key')}",
        f"--service-account-signing-key-file={inner('service-accounts.key')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--default-not-ready-toleration-seconds={EVICTED_AFTER_SECONDS}",
        f"--default-unreachable-toleration-seconds={EVICTED_AFTER_SECONDS}",
        f"--kubelet-client-certificate={inner('kubelet-client.crt')}",
        f"--kubelet-client-key={inner('kubelet-client.key')}",
        f"--kubelet-certificate-authority={inner('ca.crt')}",
        "--kubelet-preferred-address-types=InternalIP",
        *_aggregation(),
    ]


def _aggregation() -> list[str]:
    """Return options for API aggregation: Kueue's visibility API, which lists waiting workloads, needs it."""
    return [
        f"--requestheader-client-ca-file={inner('front-proxy-ca.crt')}",
        f"--requestheader-allowed-names={FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={inner('front-proxy.crt')}",
        f"--proxy-client-key-file={inner('front-proxy.key')}",
    ]


def _controller(name: str) -> list[str]:
    accesses = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    access = [f"--{access}={INNER}/{name}.kubeconfig" for access in accesses]
    return [*access, "--bind-address=127.0.0.1", "--leader-elect=false", f"--cert-dir={INNER}/{name}"]


def _controller_manager() -> list[str]:
    return [
        *_controller("controller-manager"),
        f"--service-account-private-key-file={inner('service-accounts.key')}",
        f"--root-ca-file={inner('ca.crt')}",
        f"--cluster-signing-cert-file={inner('ca.crt')}",
        f"--cluster-signing-key-file={inner('ca.key')}",
        "--use-service-account-credentials",
        "--allocate-node-cidrs=false",
        f"--node-monitor-grace-period={NODE_LOST_SECONDS}s",
        "--enable-hostpath-provisioner",  # for storage class `shared`, below settings.VOLUMES
        "--pvclaimbinder-sync-period=5s",
        "--concurrent-gc-syncs=5",
    ]
