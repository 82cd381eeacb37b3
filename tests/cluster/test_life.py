"""Start and end of the cluster: it restarts, leaves no trace, and is found after its starter was killed."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster import cluster as own
from cluster import namespace
from cluster.cgroups import ROOT
from cluster.command import MissingError, run, wait_for
from cluster.fixtures import TestCluster
from cluster.settings import CGROUP, INNER, INTERFACE, NODES, PROJECT, cache, run_folder
from support.killable_programs import Program


def traces() -> dict[str, object]:
    """Return everything that shows on this machine that a cluster runs or has run."""
    return {
        "processes": [p.name() for p in psutil.process_iter() if _is_ours(" ".join(_words(p)))],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(cache()) in line],
        "interfaces": [name for name in psutil.net_if_addrs() if name == INTERFACE],
        "groups": [str(folder) for folder in ROOT.glob(f"**/{CGROUP}")],
        "loop devices": [line for line in run(["losetup", "--all"]).splitlines() if str(cache()) in line],
        "nft tables": [line for line in run(["nft", "list", "tables"]).splitlines() if "kube-proxy" in line],
        "files": _files(),
        "run folder": run_folder().exists(),
    }


def _files() -> list[str]:
    """Return files of the cluster in the machine's own folders, to which its programs write by default."""
    fixed = ("/run/manycpu", "/tmp/hostpath_pv")  # noqa: S108
    links = [f for f in Path("/var/log").glob("containers/*") if str(INNER) in str(f.readlink())]
    networks = [f for f in Path("/var/lib/cni").glob("results/*") if str(INNER) in f.read_text()]
    return [path for path in fixed if Path(path).exists()] + [str(f) for f in (*links, *networks)]


def _is_ours(words: str) -> bool:
    """Return whether a command is the cluster's; Debian programs in its cache are used by other tests too."""
    return any(str(folder) in words for folder in (run_folder(), INNER, cache() / "programs"))


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def nothing_left() -> bool:
    return not any(traces().values())


def start() -> Program[bytes]:
    return Program([sys.executable, "-m", "cluster", "up"], cwd=PROJECT / "tests", stderr=subprocess.DEVNULL)


def test_it_listens_nowhere_on_the_machine(cluster: TestCluster) -> None:
    if cluster.own is None:
        pytest.skip("only of the project's own cluster")
    machines = Path("/proc/self/ns/net").stat().st_ino
    pids = [process.pid for process in namespace.processes(cluster.own.namespace)]
    assert len(pids) > len(NODES)
    assert machines not in {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids}


def test_one_that_is_in_use_is_not_replaced(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    if cluster.own is None:
        pytest.skip("only the project's own cluster is replaced")
    monkeypatch.setattr(own, "fingerprint", lambda: "other files")
    with pytest.raises(MissingError, match="a test session is using the cluster"):
        own.up()


@pytest.mark.ends_cluster
def test_it_leaves_nothing_behind(cluster: TestCluster) -> None:
    if cluster.own is None:
        pytest.skip("only the project's own cluster is ended")
    assert not nothing_left()
    # kubectl's cache is here and not in ~/.kube, which a person's own kubectl uses.
    assert (run_folder() / "kubectl" / "discovery").is_dir()
    assert own.down()
    assert traces() == {name: [] for name in traces()} | {"run folder": False}
    assert not own.down()


@pytest.mark.ends_cluster
def test_one_whose_starter_was_killed_is_found_and_ended(cluster: TestCluster) -> None:
    if cluster.own is None:
        pytest.skip("only the project's own cluster is ended")
    with start() as starter:
        wait_for("its first node", (run_folder() / "node-a" / "containerd.sock").exists, seconds=120)
        starter.kill()
    assert namespace.find()
    assert own.running() is None
    assert own.down()
    assert nothing_left()


@pytest.mark.ends_cluster
def test_a_second_start_finds_the_first(cluster: TestCluster) -> None:
    if cluster.own is None:
        pytest.skip("only the project's own cluster is ended")
    first = own.up()
    assert own.up() == first
    assert own.running() == first
