"""Process 1 of the cluster: creates the mounts, then reaps ended processes. The cluster ends with it.

namespace.py starts it as `init.py RUN_FOLDER` in new mount, network, process and host name namespaces. When
this process is killed, the kernel ends every other process of the cluster, and removes all mounts, interfaces
and nft tables. This file imports no other module of the project.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

INNER = Path("/run/manycpu")
VOLUMES = Path("/tmp/hostpath_pv")  # noqa: S108
VOLUMES_SIZE = "8G"  # sparse: uses disk space only for written data
# kubelet sets these sysctls for the whole machine. Files mounted over them keep the machine's unchanged.
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
# sh -c PRIVATE_FOLDER sh FOLDER MODE CACHE: mount an empty folder over FOLDER, in which CACHE stays visible.
PRIVATE_FOLDER = """set -eu
exec 3<"$3"
mount -t tmpfs -o "mode=$2" tmpfs "$1"
[ -e "$3" ] || { mkdir -p "$3"; mount --no-canonicalize --bind /proc/self/fd/3 "$3"; }
"""


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def private_folders(run: Path) -> None:
    """Mount an empty /run and /tmp for the cluster alone, with its run folder and volumes in them."""
    mount("--make-rprivate", "/")
    (run / "volumes").mkdir(exist_ok=True)
    for folder, mode in (("/run", "755"), ("/tmp", "1777")):  # noqa: S108
        subprocess.run(["sh", "-c", PRIVATE_FOLDER, "sh", folder, mode, str(run.parent)], check=True)
    INNER.mkdir()
    mount("--bind", run, INNER)
    VOLUMES.mkdir()


def volumes() -> None:
    """Mount a file system of limited size for all volumes, so that a test can fill it."""
    image = INNER / "volumes.ext4"
    subprocess.run(["truncate", "-s", VOLUMES_SIZE, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    # Direct I/O bypasses the machine's page cache, as a disk would: data is cached once and synced once.
    attach = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    device = subprocess.run(attach, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    try:
        mount(device, VOLUMES)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)  # takes effect when it is unmounted


def sysctls() -> None:
    """Let kubelet write its sysctls to files, and set those of the cluster's network namespace."""
    for name, value in KUBELET_SYSCTLS.items():
        real = Path("/proc/sys") / name
        if real.exists():
            shown = Path("/run/sysctl") / name
            shown.parent.mkdir(parents=True, exist_ok=True)
            shown.write_text(value)
            mount("--bind", shown, real)
    # For this network namespace only: pods are routed, and the kernel soon drops dead connections.
    for name, value in {"ip_forward": "1", "tcp_orphan_retries": "1", "tcp_fin_timeout": "2"}.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def hugetlb() -> None:
    """Add a hugetlb hierarchy if the machine has none: on cgroup v1, kubelet needs every kernel hierarchy."""
    real, ours = Path("/sys/fs/cgroup"), Path("/run/cgroup")
    if not (real / "memory").is_dir() or (real / "hugetlb").is_dir():
        return
    ours.mkdir()
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", ours)
    for controller in real.iterdir():
        if controller.is_symlink():
            (ours / controller.name).symlink_to(controller.readlink())
        else:
            (ours / controller.name).mkdir()
            mount("--bind", controller, ours / controller.name)
    (ours / "hugetlb").mkdir()
    mount("-t", "cgroup", "-o", "hugetlb", "cgroup", ours / "hugetlb")
    mount("--move", ours, real)


def collect() -> None:
    """Reap ended children forever. Process 1 ignores SIGTERM and similar signals by default."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while signal.sigwait({signal.SIGCHLD}):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def main() -> None:
    run = Path(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    private_folders(run)
    volumes()
    sysctls()
    hugetlb()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    mount("--make-rshared", "/")
    (INNER / "ready").touch()
    collect()


if __name__ == "__main__":
    main()
