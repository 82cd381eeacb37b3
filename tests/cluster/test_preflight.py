"""Preflight reports at once, and clearly, what the machine lacks."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cluster import cgroups, cluster, debian, fixtures, go, init, modules, network, preflight
from cluster.command import ClusterError, MissingError


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 10**12))
    monkeypatch.setattr(network, "in_the_way", lambda: None)
    monkeypatch.setattr(cgroups, "missing", lambda: None)
    monkeypatch.setattr(preflight, "MEMORY", 0)
    monkeypatch.setattr(debian, "release", lambda: "bookworm")
    monkeypatch.setattr(go, "find", lambda _: "/usr/bin/go")
    monkeypatch.setenv("MANYCPU_CACHE", "/var/empty-cache")


def test_nothing_is_missing() -> None:
    assert preflight.missing() == []


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert preflight.missing() == ["root is needed, for namespaces and mounts; run as root"]


def test_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "release", lambda: "noble")
    assert preflight.missing()[0] == "Debian (bookworm or trixie) is needed; this machine is noble"


def test_packages_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYCPU_CACHE", str(tmp_path))
    monkeypatch.setattr(debian, "_fetch", _no_package)
    with pytest.raises(MissingError, match="Debian's packages no-such-package cannot be had: none"):
        debian.ensure(["no-such-package"])


def _no_package(*_: object) -> None:
    raise ClusterError("none")


def test_debian_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in {"nft", "zstd"} else name)
    assert "apt-get install nftables zstd" in preflight.missing()[0]


def test_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 3 * 2**30))
    assert (
        "17 GiB of disk are needed below /var/empty-cache/cluster, 3.0 GiB are free" in preflight.missing()[0]
    )


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MEMORY", 2**60)
    assert "GiB of memory are needed, this machine has" in preflight.missing()[0]


def test_no_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go, "find", lambda _: None)
    monkeypatch.setattr(go, "can_fetch", lambda: False)
    assert f"no Go 1.26.0 is here, nor {go.GO_WHEEL}" in preflight.missing()[0]


def test_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "missing", lambda: "control groups have no memory")
    assert preflight.missing() == ["control groups have no memory"]


def test_another_clusters_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "in_the_way", lambda: "manycpu0 (10.203.0.2)")
    assert "interface manycpu0 (10.203.0.2) is in the way" in preflight.missing()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")
@pytest.mark.parametrize("place", ["inside/deep", "beside"])
def test_a_cache_stays_where_the_cluster_has_a_folder_of_its_own(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    cache = tmp_path / place / "cache"
    for made in (folder / "machines", cache):
        made.mkdir(parents=True)
    look = 'sh -c "$0" sh "$1" 755 "$2"; ls "$1"; touch "$2/written"'
    hidden = ["unshare", "--mount", "sh", "-c", look, init.PRIVATE_FOLDER, str(folder), str(cache)]
    done = subprocess.run(hidden, check=True, capture_output=True, text=True)
    assert "machines" not in done.stdout
    assert (cache / "written").exists()


def test_what_is_missing_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cluster, "up", _fail_as_up_does)
    session: Any = SimpleNamespace()
    with pytest.raises(pytest.fail.Exception, match="no Kubernetes cluster here: root is needed"):
        fixtures.start(session)
    assert "Set MANYCPU_SKIP_CLUSTER=1" in session.shouldfail


def _fail_as_up_does() -> None:
    raise MissingError("; ".join(preflight.missing()))


def test_the_newest_of_each_is_the_default() -> None:
    versions = {name: module.minor for name, module in modules.chosen({}).items()}
    assert versions["kubernetes"] == "1.35"
    assert versions["training-operator"] == "1.9"
    assert versions["mpi-operator"] == "0.8"
    assert versions["trainer"] == "2.3"


@pytest.mark.parametrize(
    ("component", "older", "path"),
    [
        ("kubernetes", "1.34", "k8s.io/kubernetes"),
        ("training-operator", "1.8", "github.com/kubeflow/training-operator"),
        ("mpi-operator", "0.7", "github.com/kubeflow/mpi-operator"),
    ],
)
def test_others_are_chosen_by_the_environment(component: str, older: str, path: str) -> None:
    module = modules.chosen({modules.variable(component): older})[component]
    assert module.minor == older
    assert module.version(path).startswith(f"v{older}.")
    assert module.digest() != modules.choose(component, {}).digest()


def test_a_version_there_is_not() -> None:
    with pytest.raises(
        ClusterError, match=r"MANYCPU_TEST_KUBERNETES=1\.2: there are 1\.34, 1\.35 of kubernetes"
    ):
        modules.chosen({"MANYCPU_TEST_KUBERNETES": "1.2"})
