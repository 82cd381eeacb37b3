"""Ranks under every launcher, the real torchrun and the mpirun of three MPIs: they meet, or all fail."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.killable_programs import Program
from support.rank_launches import (
    LAUNCHERS,
    LIGHT,
    MPIRUNS,
    PLAIN,
    Ended,
    by_hand,
    execute,
    launch,
    light_torchrun,
    manifest_of,
)
from support.training_scripts import ALL_REDUCE
from support.waiting import until

from manycpu.pipeline.spec.cpu_plan import CpuRequest, plan
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.targets.machines.preflight import findings
from manycpu.pipeline.targets.open_run import open_context

pytestmark = pytest.mark.usefixtures("nothing_runs_afterwards")
BUT_TORCHRUN = ["processes", pytest.param("torchrun", marks=pytest.mark.long), *MPIRUNS]
"""Launchers for what ranks do themselves: torchrun, which takes seconds to begin, is tried by other tests."""


def planned_cores(ranks: int) -> list[str]:
    made = plan(Machine.observe(), CpuRequest(processes=ranks, cpus=ranks))
    pins = made.pins or [made.machine.cpus] * ranks
    return sorted(f"cores {sorted(cpu.number for cpu in pin)}" for pin in pins)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_train_together(launcher: str, write: Callable[[str], Path]) -> None:
    """The unmodified script finds its rank, threads, cores and the backend; every rank proves itself."""
    has_torch = launcher in ("processes", "torchrun")  # what torch finds under an MPI is the same
    threads = "torch.get_num_threads()" if has_torch else "os.environ['OMP_NUM_THREADS']"
    script = (
        ALL_REDUCE
        + f"print('threads', {threads}, os.environ['OMP_NUM_THREADS'])\n"
        + "print('cores', sorted(os.sched_getaffinity(0)))\n"
    )
    ended = launch(launcher, write(script), light=not has_torch, resources={"cpu": 2}, backend="gloo")
    assert ended.code == 0, ended.out
    host = socket.gethostname()
    proofs = sorted(ended.events("proof"), key=lambda event: int(event["rank"]))
    assert [event["by"] for event in proofs] == [0, 1]
    assert {event["host"] for event in proofs} == {host}
    assert len({event["meeting"] for event in proofs}) == 1
    assert {(event["world_size"], event["threads"], event["backend"]) for event in proofs} == {(2, 1, "gloo")}
    starts = ended.events("start")
    assert [event["by"] for event in starts] == [None] * 3  # no rank has spoken as long as the start waits
    assert starts[0]["message"] == "waits for the import of torch"
    assert re.fullmatch(
        r"the import of torch took \d+\.\d s; waits for all ranks to meet: 2 .*", starts[1]["message"]
    )
    assert re.fullmatch(r"all ranks to meet: 2 .* took \d+\.\d s; the program begins", starts[2]["message"])
    used = [(event["requested"], event["observed"], event["world_size"]) for event in ended.events("backend")]
    assert used == [("gloo", "gloo", 2)] * 2
    assert ended.texts().count("sum 2") == 2
    assert ended.texts().count("threads 1 1") == 2
    assert sorted(text for text in ended.texts() if text.startswith("cores")) == planned_cores(ranks=2)
    assert sorted((event["rank"], event["code"]) for event in ended.events("exit")) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("launcher", BUT_TORCHRUN)
def test_two_runs_at_once_are_not_pinned_to_the_same_cores(
    launcher: str, write: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = f"cores {sorted(os.sched_getaffinity(0))}"
    alone = planned_cores(ranks=2)
    if alone == [whole] * 2:
        pytest.skip("ranks are pinned on two cores or more, without a quota")
    script = write("""
        import os, pathlib, time, torch.distributed as dist
        dist.init_process_group()  # else the first rank is refused, and the other ends with it
        print("cores", sorted(os.sched_getaffinity(0)), flush=True)
        pathlib.Path(os.environ["RANK"]).touch()
        while os.environ.get("WAITS") and not pathlib.Path("end").exists():
            time.sleep(0.02)
    """)
    first = manifest_of("processes", script, env=LIGHT | {"WAITS": "1"})
    env = PLAIN | {"TMPDIR": tempfile.gettempdir()} | first["env"]
    with Program[bytes](first["argv"], cwd=tmp_path, env=env, stdout=subprocess.PIPE) as other:
        until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        ended = launch(launcher, script, light=True)
        (tmp_path / "end").touch()
        out = Ended(0, other.communicate(timeout=300)[0].decode())
    assert sorted(text for text in out.texts() if text.startswith("cores")) == alone
    assert ended.code == 0, ended.out
    assert [text for text in ended.texts() if text.startswith("cores")] == [whole] * 2
    told = [event["message"] for event in ended.events("warning")]
    assert len([text for text in told if "not pinned to cores: they need" in text]) == 1, ended.out


@pytest.mark.parametrize("launcher", BUT_TORCHRUN)
def test_ranks_that_never_meet_are_no_success(launcher: str, write: Callable[[str], Path]) -> None:
    ended = launch(launcher, write("print('each alone')"), light=True)
    assert ended.code != 0
    assert any(event["code"] == 86 for event in ended.events("exit")), ended.out
    assert "without ever initialising torch.distributed" in ended.events("error")[0]["message"]


def test_ranks_may_train_in_processes_that_they_fork(write: Callable[[str], Path]) -> None:
    script = """
        import multiprocessing, torch.distributed as dist
        worker = multiprocessing.get_context("fork").Process(target=dist.init_process_group)
        worker.start()
        worker.join()
    """
    ended = launch("processes", write(script), light=True)
    assert ended.code == 0, ended.out
    assert [event["observed"] for event in ended.events("backend")] == ["gloo", "gloo"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lines_of_two_ranks_never_mix(launcher: str, write: Callable[[str], Path]) -> None:
    """Thousands of lines at once come out whole, whatever the launcher's way to forward them."""
    script = """
        import torch.distributed as dist
        dist.init_process_group()
        for i in range(4000):
            print(i, "x" * (i % 300))
    """
    ended = launch(launcher, write(script), light=True)
    assert ended.code == 0, ended.out
    expected = {f"{number} {'x' * (number % 300)}" for number in range(4000)}
    for rank in (0, 1):
        assert len(expected & {line.text for line in ended.lines if line.rank == rank}) == 4000


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_others(launcher: str, write: Callable[[str], Path]) -> None:
    """SIGKILL, as the kernel does for lack of memory: the launcher sees the signal and ends the rest."""
    script = """
        import os, signal, time, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    ended = launch(launcher, write(script), light=True)
    assert ended.code != 0
    assert {"by": 1, "event": "exit", "code": -9, "rank": 1, "host": socket.gethostname()} in ended.events(
        "exit"
    )


@pytest.mark.parametrize("launcher", BUT_TORCHRUN)
def test_a_failed_rank_ends_the_others(launcher: str, write: Callable[[str], Path]) -> None:
    """No rank waits for one that is gone, whatever the launcher does of itself."""
    script = """
        import os, time, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise SystemExit(3)
        time.sleep(600)
    """
    ended = launch(launcher, write(script), light=True)
    assert ended.code == (1 if launcher == "torchrun" else 3)
    first = ended.events("exit")[0]
    assert (first["rank"], first["code"]) == (1, 3)


DIES_ONCE = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], "sum", int(total), flush=True)
dist.destroy_process_group()  # gloo aborts where its threads outlive the interpreter
"""


def test_torchrun_restarts_ranks_that_had_met(write: Callable[[str], Path]) -> None:
    """Over gloo, which remembers addresses; tests/kubernetes/test_elastic.py restarts those of ccl."""
    ended = launch("torchrun", write(DIES_ONCE), backend="gloo", max_restarts=1)
    assert ended.code == 0, ended.out
    assert ended.texts().count("round 1 sum 2") == 2


@pytest.mark.parametrize("family", MPIRUNS)
def test_in_an_allocation_of_slurm_the_ranks_of_this_machine_stay_here(
    family: str, write: Callable[[str], Path]
) -> None:
    script = """
        import os, torch.distributed as dist
        dist.init_process_group()  # else the first rank is refused, and mpirun ends the other
        print("local", os.environ["LOCAL_RANK"])
    """
    manifest = manifest_of(family, write(script), env=LIGHT)
    allocation = {"JOB_ID": "1", "JOBID": "1", "NNODES": "2", "TASKS_PER_NODE": "1(x2)", "JOB_NUM_NODES": "2"}
    allocation |= dict.fromkeys(("NODELIST", "JOB_NODELIST"), "node[7-8]")
    env = {f"SLURM_{name}": value for name, value in allocation.items()} | manifest["env"]
    ended = execute(manifest["argv"], env, Path(manifest["cwd"]))
    assert ended.code == 0, ended.out
    assert [event["host"] for event in ended.events("proof")] == [socket.gethostname()] * 2, ended.out
    assert {"local 0", "local 1"} <= set(ended.texts())


def test_preflight_refuses_an_argument_that_mpirun_takes_for_a_separator(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    run = {"program": str(write("")), "output": str(tmp_path / "out"), "args": ["a", ":"]}
    target = {"kind": "local", "launch": "mpirun", "directory": str(tmp_path / "home")}
    found = findings(open_context(run, target, "test", base=tmp_path))  # type: ignore[arg-type]
    assert [finding.field for finding in found if finding.fatal] == ["run.args"]


@pytest.mark.parametrize("family", MPIRUNS)
def test_two_mpis_that_do_not_match(family: str, write: Callable[[str], Path]) -> None:
    """Ranks that cannot read their launcher's variables are each a world of one: twice no success."""
    manifest = manifest_of(family, write("print('trained')"), env=LIGHT)
    start = manifest["argv"].index(sys.executable)
    hidden = ["PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]
    without = ["env", *(word for name in hidden for word in ("-u", name))]
    ended = execute(
        [*manifest["argv"][:start], *without, *manifest["argv"][start:]],
        manifest["env"],
        Path(manifest["cwd"]),
    )
    assert ended.code != 0
    assert "trained" not in ended.texts()
    assert any(event["code"] == 87 for event in ended.events("exit"))
    assert "a world of 1" in ended.events("error")[0]["message"]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (({"RANK": "0"}, {"RANK": "0"}), "the ranks that met are [0, 0]"),
        (({"RANK": "0", "MANYCPU_BACKEND": "gloo"}, {"RANK": "1"}), "None and gloo (run.backend)"),
        (
            ({"RANK": "0"}, {"RANK": "1"}),
            "where run.spread requires 2 machines",
        ),
    ],
)
def test_every_rank_fails_when_the_meeting_is_wrong(
    ranks: tuple[dict[str, str], ...], message: str, write: Callable[[str], Path]
) -> None:
    asked = {"MANYCPU_NNODES": "2", "MANYCPU_NPROC_PER_NODE": "1"}
    spread = {"MANYCPU_SPREAD": "require"} if "spread" in message else {}
    for ended in by_hand(write("print('trained')"), *(LIGHT | asked | spread | rank for rank in ranks)):
        assert ended.code == 87, ended.out
        assert message in ended.events("error")[0]["message"]
        assert "trained" not in ended.texts()


def test_a_rank_that_never_comes(write: Callable[[str], Path]) -> None:
    (ended,) = by_hand(write("print('trained')"), LIGHT | {"RANK": "0", "MANYCPU_START_TIMEOUT": "2"})
    assert ended.code == 87
    assert (
        "1 of 2 ranks came within 2 s (run.start_timeout): rank 0 on" in ended.events("error")[0]["message"]
    )


def test_a_rank_whose_meeting_point_goes_says_so(write: Callable[[str], Path]) -> None:
    """Rank 0, which serves it, gives up on the third one first."""
    three = LIGHT | {"WORLD_SIZE": "3"}
    first, second = by_hand(
        write("print('trained')"), three | {"RANK": "0", "MANYCPU_START_TIMEOUT": "2"}, three | {"RANK": "1"}
    )
    assert (first.code, second.code) == (87, 87), second.out
    assert "2 of 3 ranks came within 2 s" in first.events("error")[0]["message"]
    assert "rank 1 lost the meeting point, which rank 0 serves" in second.events("error")[0]["message"]


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("processes", signal.SIGKILL),
        ("processes", signal.SIGTERM),
        ("torchrun", signal.SIGKILL),
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_nothing_survives_the_launcher(
    launcher: str, how: signal.Signals, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """A launcher that is killed outright takes its ranks along, and what those had started."""
    script = write(
        "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('ready')\ntime.sleep(600)"
    )
    log = tmp_path / "log"
    manifest = manifest_of(launcher, script, env=LIGHT if launcher == "processes" else {})
    argv = light_torchrun(manifest["argv"]) if launcher == "torchrun" else manifest["argv"]
    with log.open("wb") as out:
        process = Program(argv, env=PLAIN | manifest["env"], stdout=out, stderr=out, cwd=tmp_path)
    until(lambda: log.read_text().count("ready") == 2)
    process.send_signal(how)
    process.wait(300)
    # A killed launcher is noticed within a second; the fixture judges.
