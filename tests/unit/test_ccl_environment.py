"""The environment that oneCCL gets under each launcher."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from manycpu.pipeline.node.ccl.environment import settings
from manycpu.pipeline.node.world import Rank

FABRIC, MPI = Path("/env/lib/libfabric.so.1"), Path("/env/lib/libmpi.so.12")


def told(rank: Rank, environ: dict[str, str]) -> dict[str, str]:
    return settings(rank, environ, FABRIC, MPI, "eth0", system_has_fabric=False)


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [
        ("torchrun", {}),
        ("openmpi", {"I_MPI_ROOT": "/opt"}),
        ("hydra", {"PMI_RANK": "3"}),
        ("env", {}),
        ("none", {}),
    ],
)
def test_libfabric_is_used_but_under_intel_mpi(launcher: str, environ: dict[str, str]) -> None:
    found = told(Rank(3, 4, 1, 2, launcher), environ)
    assert found["CCL_ATL_TRANSPORT"] == "ofi"
    assert found["CCL_PROCESS_LAUNCHER"] == "none"
    assert (found["CCL_LOCAL_RANK"], found["CCL_LOCAL_SIZE"]) == ("1", "2")
    assert (found["CCL_OFI_LIBRARY_PATH"], found["FI_PROVIDER_PATH"]) == (str(FABRIC), "/env/lib")


def test_intel_mpi_is_the_transport_of_its_own_ranks() -> None:
    found = told(Rank(3, 4, 1, 2, "hydra"), {"I_MPI_HYDRA_UUID": "1"})
    assert found["CCL_ATL_TRANSPORT"] == "mpi"
    assert found["CCL_MPI_LIBRARY_PATH"] == str(MPI)
    assert found["CCL_ALLTOALLV"] == "direct"  # oneCCL's own choice hangs where ranks send unlike amounts
    assert "CCL_PROCESS_LAUNCHER" not in found


def test_the_mpi_that_launched_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / MPI.name).touch()
    found = told(Rank(0, 1, 0, 1, "hydra"), {"I_MPI_ROOT": str(tmp_path)})
    assert found["CCL_MPI_LIBRARY_PATH"] == str(tmp_path / "lib" / MPI.name)
    assert "I_MPI_OFI_LIBRARY" not in found  # oneAPI has libfabric elsewhere, and its environment says where


def test_intel_mpi_is_told_of_the_libfabric_beside_it(tmp_path: Path) -> None:
    for name in (MPI.name, FABRIC.name):
        (tmp_path / name).touch()
    intel = Rank(0, 1, 0, 1, "hydra"), {"I_MPI_HYDRA_UUID": "1"}
    found = settings(*intel, FABRIC, tmp_path / MPI.name, "eth0", system_has_fabric=False)
    assert found["I_MPI_OFI_LIBRARY"] == str(tmp_path / FABRIC.name)
    assert "I_MPI_OFI_LIBRARY" not in settings(
        *intel, FABRIC, tmp_path / MPI.name, "eth0", system_has_fabric=True
    )


def test_it_talks_over_the_interface_of_the_run() -> None:
    found = told(Rank(0, 1, 0, 1, "none"), {})
    assert (found["CCL_KVS_IFACE"], found["FI_TCP_IFACE"]) == ("eth0", "eth0")
