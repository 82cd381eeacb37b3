"""mpirun's manifests, word by word, in the dialects of three MPIs: here and on hosts."""

from typing import Any

import pytest
from support.golden import as_json, golden

from manycpu.pipeline.launchers import mpirun, processes, torchrun
from manycpu.pipeline.spec.errors import BadInputError, LaunchError
from manycpu.pipeline.spec.placement import Host, Mpi, Placement
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.spec.training_run import TrainingRun

MPIS = {
    "intel": Mpi(
        family="intel",
        version="2021.18.1",
        mpirun="/venv/bin/mpiexec.hydra",
        env={"I_MPI_ROOT": "/venv", "FI_PROVIDER_PATH": "/venv/lib"},
    ),
    "mpich": Mpi(family="mpich", version="4.0.2", mpirun="/usr/bin/mpirun.mpich"),
    "openmpi": Mpi(family="openmpi", version="4.1.4", mpirun="/usr/bin/mpirun.openmpi"),
}
TARGETS: dict[str, Local | BareMetal] = {
    "local": Local(launch="mpirun"),
    "hosts": BareMetal(hostfile="/work/hosts", ssh=("ssh", "-p", "2222"), interface="eth1"),
}


def run(**fields: Any) -> TrainingRun:
    known = {
        "program": "train.py",
        "args": ["--data", "{data}", "--out", "{output}", "--keep", "{x}"],
        "output": "/models/qa",
        "nproc_per_node": 2,
        "env": {"GREETING": "good morning", "OMP_NUM_THREADS": "3"},
    }
    return TrainingRun(**known | fields)


def place(mpi: Mpi | None, *hosts: str) -> Placement:
    return Placement(
        name="train-0123456789",
        attempt=1,
        python="/venv/bin/python",
        code="/home/code/abc",
        program=("train.py",),
        data="/home/data/squad",
        output="/home/runs/train/attempts/1/output",
        checkpoints="/home/runs/train/checkpoints",
        caches="/home/caches",
        attempt_directory="/home/runs/train/attempts/1",
        mpi=mpi,
        hosts=tuple(Host(name) for name in hosts),
        master_addr="10.0.0.2" if hosts else "127.0.0.1",
        master_port=29400,
        launcher_address="10.0.0.1",
        launcher_interface="eth0",
    )


def manifest(family: str, where: str, **fields: Any) -> dict[str, Any]:
    hosts = ("node-a", "node-b") if where == "hosts" else ()
    [command] = mpirun.objects(
        run(nnodes=len(hosts) or 1, **fields), TARGETS[where], place(MPIS[family], *hosts)
    )
    return command


def check(name: str, written: dict[str, Any]) -> None:
    text = as_json(written)
    assert text == golden(f"{name}.json", text)


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize("family", MPIS)
def test_golden(family: str, where: str) -> None:
    check(f"mpirun-{family}-{where}", manifest(family, where))


def test_golden_processes() -> None:
    check("processes-local", *processes.objects(run(), Local(), place(None)))


def test_golden_torchrun() -> None:
    check("torchrun-local", *torchrun.objects(run(max_restarts=2), Local(), place(None)))


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize("family", MPIS)
def test_no_value_of_a_variable_is_an_argument(family: str, where: str) -> None:
    secret = "not-for-ps"  # noqa: S105 - it is none
    made = manifest(family, where, env={"WORD": secret})
    assert made["env"]["WORD"] == secret
    assert not any(secret in word for word in made["argv"])
    assert (where == "local") or any("WORD" in word.split(",") for word in made["argv"])


@pytest.mark.parametrize("family", MPIS)
def test_what_the_user_sets_wins(family: str) -> None:
    made = manifest(family, "hosts", env={"MASTER_ADDR": "10.9.9.9", "I_MPI_PIN": "on"})
    assert made["env"]["MASTER_ADDR"] == "10.9.9.9"
    assert made["env"]["I_MPI_PIN"] == "on"


def test_mpich_loses_its_last_variable() -> None:
    assert list(manifest("mpich", "hosts")["env"])[-1] == "MANYCPU_LAST"


def test_a_range_of_nodes_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"run\.nnodes: .*not 1:2"):
        mpirun.objects(run(nnodes="1:2"), TARGETS["hosts"], place(MPIS["intel"], "node-a", "node-b"))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("openmpi", {"args": ["a", ":"]}, r"run\.args: mpirun takes ':'"),
        ("mpich", {"env": {"A,B": "x"}}, r"run\.env: .*'A,B'"),
    ],
)
def test_what_mpirun_reads_as_a_separator_is_refused(
    family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        manifest(family, "hosts", **fields)


def test_an_ssh_option_with_a_blank_is_refused() -> None:
    target = BareMetal(hostfile="/work/hosts", ssh=("ssh", "-i", "/my keys/id"))
    with pytest.raises(BadInputError, match=r"target\.ssh: .*'/my keys/id'"):
        mpirun.objects(run(), target, place(MPIS["openmpi"], "node-a"))


def test_openmpi_refuses_an_ssh_option_with_a_colon_at_which_it_would_cut_the_command() -> None:
    target = BareMetal(hostfile="/work/hosts", ssh=("ssh", "-J", "gateway:2222"))
    with pytest.raises(BadInputError, match=r"target\.ssh: .*'gateway:2222'"):
        mpirun.objects(run(), target, place(MPIS["openmpi"], "node-a"))
    for family in ("intel", "mpich"):
        assert mpirun.objects(run(), target, place(MPIS[family], "node-a"))


def test_without_an_mpi_there_is_no_mpirun() -> None:
    with pytest.raises(LaunchError, match=r"target\.mpi"):
        mpirun.objects(run(), TARGETS["local"], place(None))
