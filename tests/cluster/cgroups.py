"""The cluster's control groups, of version 1 or 2: a group below the root, with a child for each node."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cluster.command import ClusterError, wait_for
from cluster.settings import CGROUP, NODES, run_folder

ROOT = Path("/sys/fs/cgroup")
SUBTREE = "cgroup.subtree_control"
NEEDED = ("cpu", "cpuset", "memory", "pids")
V2_CONTROLLERS = (*NEEDED, "hugetlb", "io")


def version2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> Iterator[Path]:
    """Yield the root folder of every hierarchy that is mounted on this machine."""
    if version2():
        yield ROOT
        return
    yield from (folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.is_symlink())


def missing() -> str | None:
    """Return a message that says what this machine's control groups lack for a cluster, or None."""
    if absent := [name for name in NEEDED if name not in _controllers()]:
        return (
            f"control groups in {ROOT} have no {', '.join(absent)}: enable them on the kernel's command line"
        )
    if (ROOT / "cgroup.type").exists() and (ROOT / "cgroup.procs").read_text().strip():
        # cgroup.type exists only below the real root: there, a group with processes can have no children.
        return f"{ROOT} is a container's, and processes are in its root group: run on the machine itself"
    return None


def _controllers() -> list[str]:
    if version2():
        return (ROOT / "cgroup.controllers").read_text().split()
    return [folder.name for folder in ROOT.iterdir()]


def create() -> None:
    """Create the groups of the cluster and its nodes, and enable their controllers."""
    if version2():
        _remember(ROOT)
    for hierarchy in hierarchies():
        for folder in (hierarchy / CGROUP, *(hierarchy / CGROUP / node.name for node in NODES)):
            folder.mkdir(exist_ok=True)
            _fill_cpuset(folder)
            _enable_controllers(folder.parent)
        _weigh(hierarchy / CGROUP)


def _weigh(folder: Path) -> None:
    """Give all pods together four times the processor time of one session of processes outside the cluster.

    By default, a group counts as much as one such session. But the cluster's tests take longest.
    """
    for name, weight in (("cpu.weight", 400), ("cpu.shares", 4096)):
        if (folder / name).exists():
            (folder / name).write_text(str(weight))


def _fill_cpuset(folder: Path) -> None:
    """Copy the parent's CPUs and memory nodes: a new cpuset of version 1 has none, and runs no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if file.exists() and not version2() and not file.read_text().strip():
            file.write_text((folder.parent / name).read_text())


def _enable_controllers(folder: Path) -> None:
    if not version2():
        return
    there = (folder / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{name}" for name in V2_CONTROLLERS if name in there)
    try:
        (folder / SUBTREE).write_text(wanted)
    except OSError as error:
        raise ClusterError(f"{folder / SUBTREE} does not take '{wanted}': {error}") from error


def favor(node: str, pod: str) -> None:
    """Give a pod as much processor time as one that requests a whole core, when pods compete for it.

    Args:
        node: name of the pod's node.
        pod: uid of the pod; it requests part of a core, and has no limit.
    """
    group = Path(CGROUP, node, "kubepods", "burstable", f"pod{pod}")
    # The kubelet writes these for 1024 shares: weight = 1 + (shares - 2) * 9999 / 262142.
    file, weight = (
        (ROOT / group / "cpu.weight", 39) if version2() else (ROOT / "cpu" / group / "cpu.shares", 1024)
    )
    with suppress(FileNotFoundError):  # the pod has ended
        file.write_text(str(weight))


def _memory_of_root() -> Path:
    return run_folder() / "root-controllers"


def _remember(root: Path) -> None:
    """Save which controllers the machine's root has enabled, before the cluster enables more."""
    _memory_of_root().parent.mkdir(parents=True, exist_ok=True)
    _memory_of_root().write_text((root / SUBTREE).read_text())


def _restore(root: Path) -> None:
    """Disable the controllers that the cluster has enabled in the root; those that others use now stay."""
    if not _memory_of_root().exists():
        return
    before, now = _memory_of_root().read_text().split(), (root / SUBTREE).read_text().split()
    for name in set(now) - set(before):
        with suppress(OSError):
            (root / SUBTREE).write_text(f"-{name}")
    _memory_of_root().unlink()


def remove() -> None:
    """Remove the cluster's control groups. Its processes must have ended."""
    wait_for("the control groups to be removed", _removed, seconds=20)
    _restore(ROOT)
    _remove_private_hugetlb()


def _removed() -> bool:
    for hierarchy in hierarchies():
        for folder in _deepest_first(hierarchy / CGROUP):
            try:
                folder.rmdir()
            except OSError:
                return False
    return True


def _deepest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((f for f in [folder, *folder.rglob("*")] if f.is_dir()), key=lambda f: -len(f.parts))


def _remove_private_hugetlb() -> None:
    """Mount the hugetlb hierarchy that `init.py` may have made, and delete the cluster's groups in it.

    The kernel keeps that hierarchy as long as it has groups.
    """
    if version2() or (ROOT / "hugetlb").is_dir():
        return
    place = run_folder() / "hugetlb"
    place.mkdir(parents=True, exist_ok=True)
    script = f'mount -t cgroup -o hugetlb cgroup "$0" && find "$0/{CGROUP}" -depth -type d -exec rmdir {{}} +'
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, place], check=False, capture_output=True, timeout=20
    )
    place.rmdir()
