"""Process 1 of the cluster: makes its mounts, then collects ended processes. Its end is the cluster's end.

Started by namespace.py in new mount, network, process and host name namespaces, as `init.py RUN_FOLDER`.
When this process is killed, the kernel ends every other process of the cluster, and with them go all
mounts, interfaces and nft tables. It imports nothing of ours.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

INNER = Path("/run/manycpu")
VOLUMES = Path("/tmp/hostpath_pv")  # noqa: S108
VOLUMES_SIZE = "8G"  # sparse: takes only what is written
# kubelet sets these of the whole machine's: it is shown files in their place, so that it changes nothing.
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
# sh -c PRIVATE_FOLDER sh FOLDER MODE CACHE: an empty folder over another; a cache below it stays in view.
PRIVATE_FOLDER = """set -eu
exec 3<"$3"
mount -t tmpfs -o "mode=$2" tmpfs "$1"
[ -e "$3" ] || { mkdir -p "$3"; mount --no-canonicalize --bind /proc/self/fd/3 "$3"; }
"""


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def private_folders(run: Path) -> None:
    """Give the cluster a /run and a /tmp of its own, with the run folder and the volumes in them."""
    mount("--make-rprivate", "/")
    (run / "volumes").mkdir(exist_ok=True)
    for folder, mode in (("/run", "755"), ("/tmp", "1777")):  # noqa: S108
        subprocess.run(["sh", "-c", PRIVATE_FOLDER, "sh", folder, mode, str(run.parent)], check=True)
    INNER.mkdir()
    mount("--bind", run, INNER)
    VOLUMES.mkdir()


def volumes() -> None:
    """A file system of limited size for all volumes, so that a test can fill it."""
    image = INNER / "volumes.ext4"
    subprocess.run(["truncate", "-s", VOLUMES_SIZE, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    # Past this machine's page cache, as a disk: what is written is cached once, and synced once.
    attach = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    device = subprocess.run(attach, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    try:
        mount(device, VOLUMES)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)  # when it is unmounted


def sysctls() -> None:
    for name, value in KUBELET_SYSCTLS.items():
        real = Path("/proc/sys") / name
        if real.exists():
            shown = Path("/run/sysctl") / name
            shown.parent.mkdir(parents=True, exist_ok=True)
            shown.write_text(value)
            mount("--bind", shown, real)
    # Of this network namespace only: pods are routed, and dead connections are soon forgotten.
    for name, value in {"ip_forward": "1", "tcp_orphan_retries": "1", "tcp_fin_timeout": "2"}.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def hugetlb() -> None:
    """On cgroup v1 kubelet wants every hierarchy of the kernel: add hugetlb where the machine has it not."""
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
    """Wait for ended children for ever; SIGTERM and its like mean nothing to process 1."""
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
