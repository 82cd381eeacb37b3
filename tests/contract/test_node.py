"""What every rank does with a script: backend, exit codes, errors, signals, what it leaves behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.killable_programs import Program
from support.rank_launches import LIGHT, LIMIT, PLAIN, Ended, alone, execute, free_port, manifest_of
from support.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_runs_afterwards")


def test_a_backend_that_cannot_be_had(write: Callable[[str], Path]) -> None:
    import torch.distributed

    if torch.distributed.is_mpi_available():
        pytest.skip("this torch was built with MPI")
    ended = alone(write("print('trained')"), MANYCPU_BACKEND="mpi")
    assert ended.code == 88
    message = ended.events("error")[0]["message"]
    assert "run.backend: 'mpi' is not available" in message
    assert "was built without MPI" in message


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
    assert "asks for the backend 'cpu:fake,cuda:nccl'; 'gloo' is used" in warning["message"]
    assert [event["observed"] for event in ended.events("backend")] == ["gloo", "gloo"]
    assert "subgroup gloo" in ended.texts()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit(False)", 0),
        ("raise SystemExit(256)", 1),
        ("raise SystemExit(-512)", 1),
        ("raise SystemExit('no data')", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("raise ValueError('bad batch')", 1),
        ("this is no Python", 1),
    ],
)
def test_the_exit_code_is_the_scripts_own(script: str, code: int, write: Callable[[str], Path]) -> None:
    ended = alone(write(script), **LIGHT)
    assert ended.code == code, ended.out
    assert [event["code"] for event in ended.events("exit")] == [code]


def test_a_rank_s_end_is_told_of_the_place_where_it_met_the_others(write: Callable[[str], Path]) -> None:
    """On Kubernetes a host may have several pods of a run."""
    ended = alone(write("print('trained')"), MANYCPU_HOST="machine-a", **LIGHT)
    (met,), (end,) = ended.events("proof"), ended.events("exit")
    assert (end["host"], end["hostname"]) == ("machine-a", met["hostname"])


@pytest.mark.parametrize(
    "end",
    [
        "import io, sys\nsys.stdout = io.StringIO()",
        "import sys\nsys.stdout.close()",
        "import os\nos.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
        "import os\nos.closerange(64, 1 << 16)",
    ],
    ids=["redirected", "closed", "replaced", "others closed"],
)
def test_events_come_through_whatever_becomes_of_stdout(end: str, write: Callable[[str], Path]) -> None:
    report = "\nfrom manycpu.pipeline.node.metrics import metrics\nmetrics({'f1': 80.0})"
    ended = alone(write(f"print('before', end='')\n{end}{report}"), MANYCPU_RUN="a", **LIGHT)
    assert ended.code == 0, ended.out
    assert [event["values"] for event in ended.events("metrics")] == [{"f1": 80.0}]


def test_an_event_waits_where_the_script_made_its_full_stdout_non_blocking(
    write: Callable[[str], Path],
) -> None:
    script = """
        import os
        from manycpu.pipeline.node.metrics import metrics
        os.set_blocking(1, False)
        for number in range(200):
            try:
                while True:
                    os.write(1, b"x" * 4000 + b"\\n")
            except BlockingIOError:
                metrics({"number": number})
    """
    ended = alone(write(script), MANYCPU_RUN="a", **LIGHT)
    assert ended.code == 0, ended.texts()[-1]
    assert [event["values"]["number"] for event in ended.events("metrics")] == list(range(200))


@pytest.mark.parametrize("stdout", [True, False], ids=["stdout is there", "no file is left"])
def test_no_event_is_written_into_a_file_of_the_script_s(
    stdout: bool, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """It closes what it did not open, as daemons do, and opens files by the numbers that come free."""
    script = f"""
        import os
        from manycpu.pipeline.node.metrics import metrics
        weights = os.open("weights", os.O_WRONLY | os.O_CREAT)
        for number in [*map(int, os.listdir("/proc/self/fd"))]:
            if number > (2 if {stdout} else 0) and number != weights:
                os.dup2(weights, number)
        metrics({{"f1": 80.0}})
        os.write(weights, b"weights")
    """
    ended = alone(write(script), MANYCPU_RUN="a", **LIGHT)
    assert ended.code == 0, ended.out
    assert (tmp_path / "weights").read_text() == "weights"
    assert len(ended.events("metrics")) == int(stdout)


def test_few_files_are_enough(write: Callable[[str], Path]) -> None:
    argv = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-m", "manycpu.pipeline.node"]
    script = write("print('trained')")
    ended = execute([*argv, str(script)], LIGHT, script.parent)
    assert (ended.code, ended.texts()) == (0, ["trained"]), ended.out


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
        plain = execute([sys.executable, *how], LIGHT, tmp_path)
        ended = execute([sys.executable, "-m", "manycpu.pipeline.node", *how], LIGHT, tmp_path)
        assert plain.out.strip() in ended.texts(), (plain.out, ended.out)


def test_spawned_workers_run_the_script_not_the_node(write: Callable[[str], Path]) -> None:
    script = """
        import multiprocessing as mp, os
        class Squares:
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
            import torch  # not at the top: what only needs multiprocessing starts at once
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
    assert not ended.events("warning")


def test_what_a_script_leaves_running_neither_hangs_nor_survives(write: Callable[[str], Path]) -> None:
    """Grandchildren hold the pipe open, one in its own session; the log says that they were ended."""
    script = """
        import subprocess
        for session in (False, True):
            child = subprocess.Popen(["sleep", "600"], start_new_session=session)
            print("left", child.pid)
    """
    ended = alone(write(script), **LIGHT)
    assert ended.code == 0
    pids = [int(text.split()[1]) for text in ended.texts()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    (warning,) = ended.events("warning")
    assert warning["by"] == 0
    assert warning["message"] == "2 processes that the script left running were ended: sleep, sleep"


def test_what_ends_by_itself_soon_after_the_script_is_let_be(write: Callable[[str], Path]) -> None:
    """As helpers do that watch whether their program is still there; they may say more than a pipe holds."""
    script = """
        import os, time
        there, alive = os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.close(alive)
            os.read(there, 1)
            time.sleep(0.2)
            print("x" * 200_000)
            print("saved")
            os._exit(0)
    """
    ended = alone(write(script), **LIGHT)
    assert ended.code == 0
    assert ended.texts()[-1] == "saved"
    assert not ended.events("warning")


@pytest.mark.parametrize(("own_code", "code"), [(5, 5), (0, 128 + signal.SIGTERM)])
def test_a_signal_reaches_the_script_once(
    write: Callable[[str], Path], tmp_path: Path, own_code: int, code: int
) -> None:
    """The launcher signals its group; the script handles it, saves, and ends with a code of its own.

    0 is no success: the script has stopped before its end.
    """
    script = f"""
        import signal, sys, time
        def save(*_):
            print("saved")
            sys.exit({own_code})
        signal.signal(signal.SIGTERM, save)
        print("ready")
        while True:
            time.sleep(0.1)  # a signal just before a long sleep would wait for its end
    """
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = Program(
            [sys.executable, "-m", "manycpu.pipeline.node", str(write(script))],
            stdout=out,
            stderr=out,
            env=PLAIN | LIGHT,
            start_new_session=True,
        )
    until(lambda: "ready" in log.read_text())
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(300) == code
    ended = Ended(code, log.read_text())
    assert ended.texts() == ["ready", "saved"]
    assert [event["code"] for event in ended.events("exit")] == [code]


def test_a_progress_bar_is_shown_before_the_run_is_taken_for_stalled(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    script = """
        import os, time
        number = 0
        while not os.path.exists("seen"):
            number += 1
            print(f"\\rstep {number}", end="")
            time.sleep(0.01)
    """
    made = manifest_of("processes", write(script), nproc_per_node=1, stall_timeout=2, env=LIGHT)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = Program(made["argv"], stdout=out, stderr=out, env=PLAIN | made["env"], cwd=tmp_path)
    until(lambda: log.read_text().count("] step ") > 1)
    (tmp_path / "seen").touch()
    assert process.wait(300) == 0


def test_old_options_of_the_trainer_become_todays(write: Callable[[str], Path]) -> None:
    """In a script that names what reads them; test_question_answering_training.py has it read what comes."""
    script = "import sys\nHfArgumentParser = 'reads them'\nprint(*sys.argv[1:])\n"
    old = "--output_dir out --ddp_backend ccl --no_cuda --use_ipex --num_train_epochs 2"
    ended = alone(write(script), *old.split(), MANYCPU_BACKEND="gloo", **LIGHT)
    assert ended.code == 0, ended.out
    assert ended.texts() == ["--output_dir out --use_cpu --num_train_epochs 2"]
    notes = [event["message"].partition(":")[0] for event in ended.events("warning")]
    assert notes == ["--ddp_backend", "--no_cuda", "--use_ipex"]


def test_the_users_threads_win_with_a_warning(write: Callable[[str], Path]) -> None:
    script = write("import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    given = LIGHT | {"OMP_NUM_THREADS": "2", "MANYCPU_CPUS": "1"}
    ended = alone(script, **given, MANYCPU_USER_ENV="OMP_NUM_THREADS")
    assert "threads 2" in ended.texts()
    assert (
        "run.env: OMP_NUM_THREADS=2 makes 2 threads of 1 process on 1 core"
        in ended.events("warning")[0]["message"]
    )
    # What torchrun or a shell left behind is not wanted.
    ended = alone(script, **given)
    assert "threads 1" in ended.texts()


def test_libraries_that_help_are_preloaded_unless_the_user_has_others(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where the dynamic linker would look, an allocator is found, and is there before Python begins."""
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libjemalloc.so.2"
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    shutil.copy(next(path for path in mapped if "/libm.so" in path), library)  # any library does
    script = write("print('loaded', 'libjemalloc.so.2' in open('/proc/self/maps').read())")
    known = LIGHT | {"LD_LIBRARY_PATH": str(tmp_path / "lib")}
    assert "loaded True" in alone(script, **known).texts()
    own = {"LD_PRELOAD": "", "MANYCPU_USER_ENV": "LD_PRELOAD"}
    ended = alone(script, **known, **own)
    assert "loaded False" in ended.texts()
    (warning,) = ended.events("warning")
    assert "run.env: LD_PRELOAD= wins over the CPU plan's" in warning["message"]


def test_usage_and_a_script_that_is_not_there(tmp_path: Path) -> None:
    node = [sys.executable, "-m", "manycpu.pipeline.node"]
    assert execute(node, LIGHT, tmp_path).code == 2
    ended = execute([*node, "nowhere.py"], LIGHT, tmp_path)
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


def test_what_a_rank_prints_of_the_runs_secrets_is_hidden(write: Callable[[str], Path]) -> None:
    """Also in an error's message; a value that is returned stays, and so does what is no secret."""
    script = write("""
import os, sys
from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.node.metrics import metrics
token = os.environ["HF_TOKEN"]
print("token", token, [token], sys.argv[2], os.environ["LANG"], os.environ["OTHER_TOKEN"], flush=True)
metrics({token: 1})
warn(f"no f1 for {token}")
raise ValueError(f"401 for {token}")
""")
    given = {"HF_TOKEN": "hunter2'\\", "LANG": "C.UTF-8", "OTHER_TOKEN": "of the host"}
    ended = alone(
        script, "--api-key", "s3cr3t", MANYCPU_RUN="a", MANYCPU_USER_ENV="HF_TOKEN,LANG", **given, **LIGHT
    )
    assert ended.texts()[0] == 'token *** ["***"] *** C.UTF-8 of the host'
    assert "ValueError: 401 for ***" in ended.texts()
    assert ended.events("error")[0]["message"] == "ValueError: 401 for ***"
    assert ended.events("warning")[0]["message"] == "no f1 for ***"
    assert [*ended.events("metrics")[0]["values"]] == ["hunter2'\\"]
    assert "s3cr3t" not in ended.out


def test_nodes_meet_at_a_name_that_torchrun_does_not_take_for_its_own(tmp_path: Path) -> None:
    """DNS may not know the name of a pod that just started; 127.77 is an address of this machine."""
    torchrun = [sys.executable, "-m", "manycpu.pipeline.node.torchrun", "--nnodes=2", "--nproc-per-node=1"]
    endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.77:{free_port()}", "--local-addr=127.0.0.1"]
    timeouts = f"--rdzv-conf=join_timeout={LIMIT},read_timeout={LIMIT}"
    command = [*torchrun, *endpoint, timeouts, "--no-python", "true"]
    nodes = [
        Program(command, env=PLAIN | {"MANYCPU_NODE_RANK": str(rank)}, cwd=tmp_path, start_new_session=True)
        for rank in range(2)
    ]
    assert [node.wait(LIMIT) for node in nodes] == [0, 0]
