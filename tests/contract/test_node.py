"""What runs on every rank, under the real torchrun and the real mpirun of three MPIs."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ALL_REDUCE
from helpers import processes_of, until

from manycpu.pipeline.adapters import mpi
from manycpu.pipeline.launchers import mpirun, torchrun
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.spec.training_run import TrainingRun

MPIRUNS = {"intel": f"{sys.prefix}/bin/mpirun", "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
LAUNCHERS = ["torchrun", *MPIRUNS]
PLAIN = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


@pytest.fixture(autouse=True)
def nothing_runs_afterwards(tmp_path: Path) -> Iterator[None]:
    """See that no test leaves a process; an mpirun may end a moment before its ranks."""
    yield
    until(lambda: not list(processes_of(tmp_path)), 10)


class Ended:
    """A command that ended: its code, its lines, and the events among them."""

    def __init__(self, code: int, out: str) -> None:
        self.code, self.out = code, out
        self.lines = [events.split(line) for line in out.splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Find the events of a kind, each with the rank that said it."""
        found = [(line.rank, events.decode(line.text)) for line in self.lines]
        return [{"by": rank, **event} for rank, event in found if event and event["event"] == kind]

    def texts(self) -> list[str]:
        """Find what is no event."""
        return [line.text for line in self.lines if events.decode(line.text) is None]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def execute(argv: list[str], env: Mapping[str, str], cwd: Path) -> Ended:
    done = subprocess.run(
        argv,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=PLAIN | dict(env),
        cwd=cwd,
        timeout=90,
    )
    return Ended(done.returncode, done.stdout.decode())


def launch(launcher: str, script: Path, *args: str, **fields: Any) -> Ended:
    """Launch two ranks of a script through the manifest that a local run has."""
    manifest = manifest_of(launcher, script, *args, **fields)
    return execute(manifest["argv"], manifest["env"], script.parent)


def manifest_of(launcher: str, script: Path, *args: str, **fields: Any) -> dict[str, Any]:
    known = {"nproc_per_node": 2, "start_timeout": 60} | fields
    run = TrainingRun(program=str(script), args=args, output=str(script.parent / "model"), **known)
    target = Local(launch="torchrun" if launcher == "torchrun" else "mpirun")
    folder = str(script.parent)
    placement = Placement(
        name="train-0123456789",
        attempt=1,
        python=sys.executable,
        code=folder,
        program=(str(script),),
        output=folder,
        checkpoints=f"{folder}/checkpoints",
        caches=f"{folder}/caches",
        attempt_directory=folder,
        mpi=None if launcher == "torchrun" else found(launcher),
        master_port=free_port(),
    )
    return (torchrun if launcher == "torchrun" else mpirun).manifest(run, target, placement)


def found(family: str) -> Any:
    try:
        return mpi.find(MPIRUNS[family])
    except ManycpuError as error:
        pytest.skip(f"{error} (tests/system-packages)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alone(script: Path, *args: str, **env: str) -> Ended:
    """Run a script as the only rank, with no launcher at all."""
    return execute([sys.executable, "-m", "manycpu.pipeline.node", str(script), *args], env, script.parent)


def by_hand(script: Path, *ranks: Mapping[str, str]) -> list[Ended]:
    """Start ranks by hand, side by side."""
    common = PLAIN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": "2", "MANYCPU_START_TIMEOUT": "60"}
    argv = [sys.executable, "-m", "manycpu.pipeline.node", str(script)]
    started = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**common, **rank})
        for rank in ranks
    ]
    outs = [process.communicate(timeout=60)[0].decode() for process in started]
    return [Ended(process.returncode, out) for process, out in zip(started, outs, strict=True)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_train_together(launcher: str, write: Callable[[str], Path]) -> None:
    """The unmodified script finds its rank, its threads and the backend; every rank proves itself."""
    script = ALL_REDUCE + "print('threads', torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])\n"
    ended = launch(launcher, write(script), resources={"cpu": 2})
    assert ended.code == 0, ended.out
    host = socket.gethostname()
    proofs = sorted(ended.events("proof"), key=lambda event: int(event["rank"]))
    assert [event["by"] for event in proofs] == [0, 1]
    assert {event["host"] for event in proofs} == {host}
    assert {(event["world_size"], event["threads"], event["backend"]) for event in proofs} == {(2, 1, "gloo")}
    used = [(event["asked"], event["observed"], event["world_size"]) for event in ended.events("backend")]
    assert used == [("gloo", "gloo", 2)] * 2
    assert ended.texts().count("sum 2") == 2
    assert ended.texts().count("threads 1 1") == 2
    assert sorted((event["rank"], event["code"]) for event in ended.events("exit")) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_that_never_initialises(launcher: str, write: Callable[[str], Path]) -> None:
    ended = launch(launcher, write("print('each alone')"))
    assert ended.code != 0
    assert any(event["code"] == 86 for event in ended.events("exit")), ended.out
    assert "without ever initialising torch.distributed" in ended.events("error")[0]["message"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lines_of_two_ranks_never_mix(launcher: str, write: Callable[[str], Path]) -> None:
    """Thousands of lines at once come out whole, whatever the launcher's way to forward them."""
    script = "for i in range(4000):\n    print(i, 'x' * (i % 300))\nraise SystemExit(0)\n"
    ended = launch(launcher, write(script))
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
        time.sleep(100)
    """
    ended = launch(launcher, write(script))
    assert ended.code != 0
    assert {"by": 1, "event": "exit", "code": -9, "rank": 1, "host": socket.gethostname()} in ended.events(
        "exit"
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failed_rank_ends_the_others(launcher: str, write: Callable[[str], Path]) -> None:
    """No rank waits for one that is gone, whatever the launcher does of itself."""
    script = """
        import os, time, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise SystemExit(3)
        time.sleep(100)
    """
    ended = launch(launcher, write(script))
    assert ended.code == (1 if launcher == "torchrun" else 3)
    first = ended.events("exit")[0]
    assert (first["rank"], first["code"]) == (1, 3)


@pytest.mark.parametrize("family", MPIRUNS)
def test_two_mpis_that_do_not_match(family: str, write: Callable[[str], Path]) -> None:
    """Ranks that cannot read their launcher's variables are each a world of one: twice no success."""
    manifest = manifest_of(family, write("print('trained')"))
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
    for ended in by_hand(write("print('trained')"), *(asked | spread | rank for rank in ranks)):
        assert ended.code == 87, ended.out
        assert message in ended.events("error")[0]["message"]
        assert "trained" not in ended.texts()


def test_a_rank_that_never_comes(write: Callable[[str], Path]) -> None:
    (ended,) = by_hand(write("print('trained')"), {"RANK": "0", "MANYCPU_START_TIMEOUT": "2"})
    assert ended.code == 87
    assert (
        "1 of 2 ranks came within 2 s (run.start_timeout): rank 0 on" in ended.events("error")[0]["message"]
    )


@pytest.mark.parametrize(("backend", "why"), [("mpi", "was built without MPI"), ("ccl", "no ccl backend")])
def test_a_backend_that_cannot_be_had(backend: str, why: str, write: Callable[[str], Path]) -> None:
    import torch.distributed

    if backend == "mpi" and torch.distributed.is_mpi_available():
        pytest.skip("this torch was built with MPI")
    ended = alone(write("print('trained')"), MANYCPU_BACKEND=backend)
    assert ended.code == 88
    assert f"run.backend: '{backend}' cannot be had" in ended.events("error")[0]["message"]
    assert why in ended.events("error")[0]["message"]


def test_another_choice_of_the_script_is_overridden_aloud(write: Callable[[str], Path]) -> None:
    """Also where device_mesh has bound init_process_group; a subgroup keeps its own backend."""
    script = """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        import torch.distributed.device_mesh as mesh
        assert mesh.init_process_group is dist.init_process_group
        dist.init_process_group("cpu:fake,cuda:nccl")
        print("subgroup", dist.get_backend(dist.new_group(backend="gloo")))
        dist.destroy_process_group()
        init_device_mesh("cpu", (1,))
        dist.destroy_process_group()
    """
    ended = alone(write(script), MANYCPU_BACKEND="gloo")
    assert ended.code == 0, ended.out
    (warning,) = ended.events("warning")
    assert "asks for the backend 'cpu:fake,cuda:nccl'; run.backend is 'gloo'" in warning["message"]
    assert [event["observed"] for event in ended.events("backend")] == ["gloo", "gloo"]
    assert "subgroup gloo" in ended.texts()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit('no data')", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("raise ValueError('bad batch')", 1),
        ("this is no Python", 1),
    ],
)
def test_the_exit_code_is_the_scripts_own(script: str, code: int, write: Callable[[str], Path]) -> None:
    ended = alone(write(script))
    assert ended.code == code, ended.out
    assert [event["code"] for event in ended.events("exit")] == [code]


def test_an_error_is_recorded_as_torchelastic_does(write: Callable[[str], Path], tmp_path: Path) -> None:
    """The traceback begins at the script, the event is short, the file is torchelastic's."""
    record = tmp_path / "error.json"
    ended = alone(
        write("def step():\n    raise ValueError('bad batch')\nstep()"), TORCHELASTIC_ERROR_FILE=str(record)
    )
    (error,) = ended.events("error")
    assert (error["kind"], error["message"]) == ("ValueError", "ValueError: bad batch")
    trace = [line for line in ended.texts() if line.strip().startswith("File ")]
    assert [Path(line.split('"')[1]).name for line in trace] == ["train.py", "train.py"]
    assert "bad batch" in record.read_text()


def test_a_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    """Arguments, path, name and imports are those of ``python SCRIPT`` and ``python -m MODULE``."""
    (tmp_path / "beside.py").write_text("x = 1\n")
    show = "import sys, json, beside\nprint(json.dumps([__name__, __file__, sys.argv, sys.path]))\n"
    (tmp_path / "show.py").write_text(show)
    for how in (["show.py", "-a", "--b=1"], ["-m", "show", "-a", "--b=1"]):
        plain = execute([sys.executable, *how], {}, tmp_path)
        ended = execute([sys.executable, "-m", "manycpu.pipeline.node", *how], {}, tmp_path)
        assert plain.out.strip() in ended.texts(), (plain.out, ended.out)


def test_spawned_workers_run_the_script_not_the_node(write: Callable[[str], Path]) -> None:
    script = """
        import multiprocessing as mp, os, torch
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return index * index
        def work(queue):
            queue.put((__name__, os.getpid()))
        if __name__ == "__main__":
            context = mp.get_context("spawn")
            queue = context.Queue()
            worker = context.Process(target=work, args=(queue,))
            worker.start()
            print("worker", queue.get()[0])
            worker.join()
            for start in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(
                    Squares(), batch_size=4, num_workers=1, multiprocessing_context=start
                )
                print(start, next(iter(loader)).tolist())
    """
    ended = alone(write(script))
    assert ended.code == 0, ended.out
    assert ended.texts() == ["worker __mp_main__", "fork [0, 1, 4, 9]", "spawn [0, 1, 4, 9]"]
    assert len(ended.events("proof")) == 1


def test_what_a_script_leaves_running_neither_hangs_nor_survives(write: Callable[[str], Path]) -> None:
    """Grandchildren hold the pipe open, one even in a session of its own."""
    script = """
        import subprocess
        for session in (False, True):
            child = subprocess.Popen(["sleep", "600"], start_new_session=session)
            print("left", child.pid)
    """
    ended = alone(write(script))
    assert ended.code == 0
    pids = [int(text.split()[1]) for text in ended.texts()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_signal_reaches_the_script_once(write: Callable[[str], Path], tmp_path: Path) -> None:
    """The launcher signals its group; the script handles it, saves, and ends with a code of its own."""
    script = """
        import signal, sys, time
        def save(*_):
            print("saved")
            sys.exit(5)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        time.sleep(60)
    """
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "manycpu.pipeline.node", str(write(script))],
            stdout=out,
            stderr=out,
            env=PLAIN,
            start_new_session=True,
        )
    until(lambda: "ready" in log.read_text())
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(20) == 5
    assert Ended(5, log.read_text()).texts() == ["ready", "saved"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_launcher(
    how: signal.Signals, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """A launcher that is killed outright takes its ranks along, and what those had started."""
    script = write(
        "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('ready')\ntime.sleep(600)"
    )
    log = tmp_path / "log"
    manifest = manifest_of("torchrun", script)
    with log.open("wb") as out:
        process = subprocess.Popen(
            manifest["argv"], env=PLAIN | manifest["env"], stdout=out, stderr=out, cwd=tmp_path
        )
    until(lambda: log.read_text().count("ready") == 2, 60)
    process.send_signal(how)
    process.wait(60)
    # A killed launcher is noticed within a second; the fixture judges.


def test_old_options_of_the_trainer_run_as_written_down(write: Callable[[str], Path]) -> None:
    script = """
        from transformers import HfArgumentParser, TrainingArguments
        (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
        print("parsed", training.use_cpu, training.ddp_backend, training.num_train_epochs)
    """
    old = [
        "--output_dir",
        "out",
        "--ddp_backend",
        "ccl",
        "--no_cuda",
        "--use_ipex",
        "--num_train_epochs",
        "2",
    ]
    ended = alone(write(script), *old, MANYCPU_BACKEND="gloo")
    assert ended.code == 0, ended.out
    assert "parsed True None 2.0" in ended.texts()
    notes = [event["message"].partition(":")[0] for event in ended.events("warning")]
    assert notes == ["--ddp_backend", "--no_cuda", "--use_ipex"]


def test_the_users_threads_win_with_a_warning(write: Callable[[str], Path]) -> None:
    script = write("import torch; print('threads', torch.get_num_threads())")
    ended = alone(script, OMP_NUM_THREADS="2", MANYCPU_USER_ENV="OMP_NUM_THREADS", MANYCPU_CPUS="1")
    assert "threads 2" in ended.texts()
    assert "run.env: OMP_NUM_THREADS=2 wins" in ended.events("warning")[0]["message"]
    # What torchrun or a shell left behind is nobody's wish.
    ended = alone(script, OMP_NUM_THREADS="2", MANYCPU_CPUS="1")
    assert "threads 1" in ended.texts()


def test_usage_and_a_script_that_is_not_there(tmp_path: Path) -> None:
    node = [sys.executable, "-m", "manycpu.pipeline.node"]
    assert execute(node, {}, tmp_path).code == 2
    ended = execute([*node, "nowhere.py"], {}, tmp_path)
    assert ended.code == 2
    assert f"no script nowhere.py in {tmp_path}" in ended.events("error")[0]["message"]


def test_the_pump_is_light() -> None:
    """What stays beside every rank loads no torch and no pydantic."""
    code = (
        "import sys, runpy; sys.argv = ['node'];"
        "import manycpu.pipeline.node.__main__;"
        "print([name for name in ('torch', 'pydantic', 'numpy', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
