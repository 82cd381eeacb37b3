"""Control groups of both versions: missing controllers are reported, and created groups are removed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import cgroups
from cluster.settings import CGROUP, NODES

GROUP = "manycpu-test"


def mounted() -> Path | None:
    """Return where this machine has mounted version 2, even if it mainly uses version 1; None: nowhere."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(place) for _, place, kind, *_ in lines if kind == "cgroup2"), None)


@pytest.fixture
def version2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use the machine's own version 2 hierarchy, with another group name than the cluster's."""
    root = mounted()
    if root is None or not os.access(root / cgroups.SUBTREE, os.W_OK):
        pytest.skip("this machine has no cgroup version 2 that may be changed here")
    monkeypatch.setenv("MANYCPU_CACHE", str(tmp_path))
    monkeypatch.setattr(cgroups, "ROOT", root)
    monkeypatch.setattr(cgroups, "CGROUP", GROUP)
    yield root
    for folder in sorted(root.glob(f"{GROUP}/**/"), reverse=True):
        folder.rmdir()


def test_version_2_has_groups_for_the_nodes_with_what_there_is_enabled(version2: Path) -> None:
    before = (version2 / cgroups.SUBTREE).read_text()
    there = set((version2 / "cgroup.controllers").read_text().split()) & set(cgroups.V2_CONTROLLERS)
    cgroups.create()
    assert there <= set((version2 / cgroups.SUBTREE).read_text().split())
    for node in NODES:
        assert there <= set((version2 / GROUP / node.name / "cgroup.controllers").read_text().split())
    cgroups.remove()
    assert not (version2 / GROUP).exists()
    assert (version2 / cgroups.SUBTREE).read_text() == before


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that replaces /sys/fs/cgroup."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


def test_version_2_that_has_all(files: Path) -> None:
    (files / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids rdma")
    (files / "cgroup.procs").write_text("1\n")
    assert cgroups.missing() is None


def test_version_2_without_a_controller(files: Path) -> None:
    (files / "cgroup.controllers").write_text("cpuset cpu io pids")
    assert "have no memory" in (cgroups.missing() or "")


def test_version_2_in_a_container_whose_processes_are_in_the_root_group(files: Path) -> None:
    (files / "cgroup.controllers").write_text("cpuset cpu io memory pids")
    (files / "cgroup.type").write_text("domain\n")
    (files / "cgroup.procs").write_text("1\n")
    assert "processes are in its root group" in (cgroups.missing() or "")


def test_version_1_that_has_all(files: Path) -> None:
    for name in cgroups.NEEDED:
        (files / name).mkdir()
    assert cgroups.missing() is None


def test_version_1_without_a_controller(files: Path) -> None:
    for name in ("cpu", "memory", "pids"):
        (files / name).mkdir()
    assert "have no cpuset" in (cgroups.missing() or "")


def test_all_pods_together_have_the_weight_of_several_sessions(files: Path) -> None:
    for name in ("cpu.weight", "cpu.shares"):
        (files / name).write_text("1")
    cgroups._weigh(files)  # noqa: SLF001 - the group of a cluster that runs has it already
    assert [(files / name).read_text() for name in ("cpu.weight", "cpu.shares")] == ["400", "4096"]


def test_a_favored_pod_has_the_weight_of_a_core_with_both_versions(files: Path) -> None:
    inside = Path(CGROUP, "node-a", "kubepods", "burstable", "pod1")
    shares, weight = files / "cpu" / inside / "cpu.shares", files / inside / "cpu.weight"
    shares.parent.mkdir(parents=True)
    cgroups.favor("node-a", "1")
    assert shares.read_text() == "1024"
    (files / "cgroup.controllers").write_text("cpu")
    weight.parent.mkdir(parents=True)
    cgroups.favor("node-a", "1")
    assert weight.read_text() == "39"


def test_a_pod_that_has_ended_is_not_favored(files: Path) -> None:
    cgroups.favor("node-a", "1")
    assert list(files.iterdir()) == []
