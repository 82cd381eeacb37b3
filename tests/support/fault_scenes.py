"""Scenes of trials, here or on a host: a command, what it finds, and what is left after it."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar, Final

import psutil
import yaml
from support import fault_judge
from support.fault_judge import Ended, Point
from support.killable_programs import Program
from support.namespace_hosts import Host
from support.rank_launches import LIGHT, PACKAGE
from support.waiting import processes_of, until

from manycpu.operators import local_airflow
from manycpu.pipeline.adapters.commands import end
from manycpu.pipeline.spec.output import PARTIALS

SCRIPT: Final = Path(__file__).parents[1] / "scripts" / "fault_at.py"
_SECONDS: Final = 150  # after which a command counts as one that never ends
_DAY_S: Final = 86_400
_RUN_ID: Final = "x"
_PRESENT: Final = "of-a-user"
"""The present value of a secret in the environment of every run; an earlier try may have another value."""
OTHER: Final = "other-0123456789"
"""Name of another user's run."""


class Server:
    """Runs commands as forks of one process that has imported everything: a command takes half the time."""

    def __init__(self, start: Callable[[], Program[str]], airflow: Path | None = None) -> None:
        self._start, self._program = start, start()
        self.airflow = airflow
        """The folder of an Airflow for its commands, with an unused database, new.db; None: no Airflow."""
        self._log = "said"  # name of the file with the output of a command

    @cached_property
    def beside(self) -> "Server":
        """Another server, for a command that runs at the same time as one of this server."""
        server = Server(self._start)
        server._log = "said.beside"
        return server

    def kill(self) -> None:
        """Kill the command that runs now."""
        for command in psutil.Process(self._program.pid).children():
            command.kill()

    def type(self, scene: "Scene", words: Sequence[str], fault: str = "kill", count: int = 0) -> Ended:
        """Run a command of a scene to its end, with a fault at change number ``count``; 0: no fault."""
        log = scene.folder / self._log
        log.write_text("")
        given = {"fault": fault, "count": count, "words": words, "env": scene.env, "seconds": _SECONDS}
        given |= {"folder": str(scene.folder), "log": str(log), "ahead_s": scene.ahead_s}
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(given) + "\n")
        stdin.flush()
        ended = Ended(int(stdout.readline()), log.read_text(errors="replace"))
        scene.said += ended.said
        scene.typed += 1
        return ended


@contextmanager
def server(
    target: str = "machines", product: Path | None = None, airflow: Path | None = None
) -> Iterator[Server]:
    """Start a server for a kind of target; it ends with the block.

    Args:
        target: The kind: ``machines`` or ``kubernetes``.
        product: The folder from which manycpu is imported; None: that of the tests.
        airflow: The folder of an Airflow with an unused database, new.db: its tasks are the commands, on any
            target. None: the commands are those of the command line.
    """
    path = [str(product), os.environ.get("PYTHONPATH", "")] if product else []
    env = os.environ | ({"PYTHONPATH": ":".join(path)} if path else {})
    env |= {"AIRFLOW_HOME": str(airflow)} if airflow else {}
    argv = [sys.executable, str(SCRIPT), "serve", "airflow" if airflow else target]
    with ExitStack() as stack:

        def start() -> Program[str]:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            return stack.enter_context(Program(argv, env=env, **pipes))

        yield Server(start, airflow)


class Scene(ABC):
    """A command, the state that it finds, and what to look at after it; all files are below one folder."""

    program: ClassVar[str]
    """Source of the training's program."""
    harmless: Sequence[str] = ("ahead", "back")
    """Faults that must change nothing."""
    endures = False
    """Whether the command must succeed in spite of one error."""
    where = "local"
    """The target, as a part of the title of trials."""
    what = ""
    """The state that the command finds, as a part of the title of trials; empty: nothing special."""
    fields: ClassVar[dict[str, Any]] = {}
    """More fields of the run."""
    ahead_s = 0.0
    """How many seconds the clock of the next command is ahead; negative: it is behind."""
    changes = "said.changes"
    """Name of the file that lists the places where the command could meet a fault."""

    def __init__(
        self, folder: Path, target: Mapping[str, Any] | None = None, host: Host | None = None
    ) -> None:
        target = target or {"kind": "local", "directory": str(folder / "home")}
        self.folder, self.out, self.host = folder, folder / "out", host
        self.home = Path(target.get("directory", folder / "home"))
        self.env = {"MANYCPU_HOME": str(self.home)}
        self.said, self.typed = "", 0
        """What all commands of a trial have printed, and the number of these commands."""
        inputs = folder / "code" / "train.py", folder / "data" / "one", folder / "data" / "more" / "two"
        for file in inputs:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.program if file.suffix else f"some data: {file.name}")
        run: dict[str, Any] = {"program": str(inputs[0]), "args": [str(folder), "{data}"]}
        run |= {"data": str(folder / "data"), "output": str(self.out)}
        run |= {"env": LIGHT | {"SERVICE_TOKEN": _PRESENT}}
        run |= {"nproc_per_node": 1, "backend": "gloo"} | self.fields
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump({"run": run, "target": target}))
        self.run = ("run", str(self.file), "--run-id", _RUN_ID)

    @property
    @abstractmethod
    def words(self) -> Sequence[str]:
        """The command that meets the fault."""

    def title(self, faults: str) -> str:
        """Return the title of trials of this scene; ``faults`` says which faults they have."""
        return f"{self.words[0]}{self.what}, {self.where}, {faults}"

    def import_from(self, library: Path) -> None:
        """Let supervisors and ranks import manycpu from the folder from which their command imports it."""
        described = yaml.safe_load(self.file.read_text())
        env = described["run"]["env"]
        env["PYTHONPATH"] = env["PYTHONPATH"].replace(str(PACKAGE), f"{library}:{PACKAGE}")
        self.file.write_text(yaml.safe_dump(described))

    def prepare(self, server: Server) -> None:  # noqa: B027 - most begin with nothing
        """Create the state that the command finds."""

    def reset(self) -> None:
        """End and delete what an earlier trial left."""
        self.said, self.typed = "", 0
        end(list(processes_of(self.folder)))
        for path in (self.home, self.out, *self.folder.glob("seen*"), *self.folder.glob(".*")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.host:
            self.host.run("rm", "-rf", str(self.home))
        self.put_other_run()

    def put_other_run(self) -> None:
        """Create a run of another user, which has failed and is kept for 30 days."""
        folder = self.home / "runs" / OTHER
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "checkpoint").write_text("of hours")
        (folder / "ledger.json").write_text(json.dumps(self.other_entry()))
        lease = {"until": time.time() + 30 * _DAY_S, "ended": True, "kept": True}
        (folder / "lease.json").write_text(json.dumps(lease))

    def other_entry(self) -> dict[str, Any]:
        """Return the ledger's entry of the run of another user."""
        target = yaml.safe_load(self.file.read_text())["target"]
        run = {"program": str(self.folder / "code" / "train.py"), "output": str(self.folder / "other")}
        return {"key": OTHER[-10:], "name": OTHER, "created": time.time(), "run": run, "target": target}

    def meet(self, server: Server, point: Point | None) -> Ended:
        """Run the command, with a fault at one of its ``places``; None: without a fault."""
        fault, place = point or ("", "0")
        return server.type(self, self.words, fault, int(place.split()[0]))

    def places(self) -> list[str]:
        """List the changes of the command that ended last, numbered from 1: each could meet a fault."""
        changes = (self.folder / self.changes).read_text().replace(f"{self.folder}/", "").splitlines()
        return [f"{number} {change}" for number, change in enumerate(changes, 1)]

    def struck(self, point: Point) -> bool:
        """Whether the command that ended last came to the place of its fault."""
        return len(self.places()) >= int(point[1].split()[0])

    @staticmethod
    def points(places: Sequence[str], *, crashes: bool) -> list[Point]:
        """List each place with each fault that can strike there: crashes of the command, or else errors."""
        return fault_judge.points(places, crashes=crashes)

    def found(self) -> dict[str, object]:
        """Look at what the command has left; subclasses add to this. Trials compare all values."""
        with suppress(AssertionError):  # a supervisor ends just after its exit record
            until(lambda: not self._processes(), 30)
        inputs = [path for name in ("code", "data") for path in (self.folder / name).rglob("*")]
        texts = {
            str(path.relative_to(self.folder)): (path.stat().st_mode, path.read_text())
            for path in inputs
            if path.is_file()
        }
        return {"processes": self._processes(), "the user's files": texts}

    def _processes(self) -> list[str]:
        here = [str(process) for process in processes_of(self.folder)]
        return [*here, *(self.host.processes().values() if self.host else ())]

    def files(self) -> frozenset[str]:
        """List all files here and on the host, except those with the output of commands."""
        inside = [path for root in {self.folder, self.home} for path in root.rglob("*")]
        paths = [os.path.relpath(path, self.folder) for path in inside if not path.name.startswith("said")]
        if self.host:
            there = self.host.run("sh", "-c", f"mkdir -p '{self.home}' && find '{self.home}' -mindepth 1")
            paths += [f"host:{path}" for path in there.splitlines()]
        return frozenset(paths)

    def report(self) -> list[object]:
        """Read the fields of the report that must be the same after each trial."""
        file = self.out / "report.json"
        try:
            report = json.loads(file.read_text()) if file.exists() else {}
        except ValueError:
            return ["it is no JSON"]
        return [report.get(name) for name in ("state", "left_behind", "kept")]

    def repeat(self, server: Server) -> Ended:
        """Run the command again, without a fault."""
        return server.type(self, self.words)

    def name(self) -> str:
        """The name of the run."""
        (folder,) = (self.home / "runs").glob("train-*")
        return folder.name

    def lease_days(self) -> int:
        """Return for how many days from its creation the run is protected by its lease."""
        run = self.home / "runs" / self.name()
        lease, ledger = (json.loads((run / f"{name}.json").read_text()) for name in ("lease", "ledger"))
        return int((lease["until"] - ledger["created"]) / _DAY_S)


class Runs(Scene):
    """`manycpu run`: it trains once, and its model, its green report and what later runs reuse are left."""

    program = """
import os, pathlib, subprocess, sys, uuid
folder, data = map(pathlib.Path, sys.argv[1:])
token = uuid.uuid4().hex
with (folder / "seen").open("a") as seen:
    seen.write(token + "\\n")
for number in range(3):
    print("line", number, token, end="\\n" if number < 2 else "", flush=True)
subprocess.Popen(["sleep", "3600"], env={"LEFT": str(folder)})
read = " ".join(sorted(path.read_text() for path in data.rglob("*") if path.is_file()))
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text(f"{token} {read}")
"""

    @property
    def words(self) -> Sequence[str]:
        return self.run

    def found(self) -> dict[str, object]:
        seen, file = self.folder / "seen", self.out / "model.txt"
        trained = seen.read_text().split() if seen.exists() else []
        token, _, read = (file.read_text() if file.exists() else "").partition(" ")
        lines = [f"line {number} {token}" for token in trained for number in range(3)]
        return {
            "trained": len(trained),
            "model of the training": [token] == trained[-1:],
            "read": read,
            "lines not shown": [line for line in lines if line not in self.said],
            "lines shown twice": [line for line in lines if self.said.count(line) > self.typed],
            "report": self.report(),
            "files": self.files(),
            **super().found(),
        }


class RunsAfterClockJump(Runs):
    """`manycpu run` that was killed, and runs again after the clock has jumped ahead."""

    what = " again after the clock jumped ahead"
    jump_s = 3 * _DAY_S

    def repeat(self, server: Server) -> Ended:
        self.ahead_s = self.jump_s
        ended = super().repeat(server)
        self.ahead_s = 0.0
        return ended


class RunsAfterClockJumpBack(RunsAfterClockJump):
    """`manycpu run` that was killed, and runs again after the clock has jumped back."""

    what = " again after the clock jumped back"
    jump_s = -3 * _DAY_S


class RunsAfterLostModel(Runs):
    """`manycpu run` that was killed, and again after somebody deleted its model while it has a copy."""

    what = " again after its model was deleted"

    def repeat(self, server: Server) -> Ended:
        model = self.out / "model.txt"
        found = [path.relative_to(self.folder) for path in self.folder.rglob(model.name) if path != model]
        # A folder whose name begins with a dot is being deleted: what is in it may be gone in part.
        has_copy = any(not any(part.startswith(".") for part in path.parts) for path in found)
        if has_copy:
            model.unlink(missing_ok=True)
        return super().repeat(server)


class RunsPerhapsAgain(Runs):
    """`manycpu run` whose training may begin again, because the fault ends more than the command.

    So the number of trainings, and lines that were not shown, are not judged.
    """

    def found(self) -> dict[str, object]:
        left = super().found()
        return {name: left[name] for name in left if name not in ("trained", "lines not shown")}


class RunsAfterPowerLoss(RunsPerhapsAgain):
    """`manycpu run`, which runs again after the machine has lost power: the training may begin again."""

    what = " after a loss of power"

    @staticmethod
    def points(places: Sequence[str], *, crashes: bool) -> list[Point]:
        return [("power", place) for place in places] if crashes else []

    def meet(self, server: Server, point: Point | None) -> Ended:
        ended = super().meet(server, point)
        if ended.killed:
            end(list(processes_of(self.folder)))
        return ended


class RunsWithFaultsInSupervisor(RunsPerhapsAgain):
    """`manycpu run` whose supervisor meets the faults: a second command may begin the training again."""

    what = " with faults in its supervisor"
    changes = "said.supervisor"
    fields: ClassVar[dict[str, Any]] = {
        "env": {"PYTHONPATH": f"{SCRIPT.parent / 'faulty_supervisor'}:{LIGHT['PYTHONPATH']}"},
        "run_timeout": _DAY_S,  # shorter than a jump of the clock
    }

    def meet(self, server: Server, point: Point | None) -> Ended:
        fault, place = point or ("", "0")
        log, usual = self.folder / self.changes, self.env
        log.write_text("")
        given = {"fault": fault, "count": place.split()[0], "log": str(log)}
        self.env = usual | {"SUPERVISOR_FAULT": json.dumps(given)}
        ended = super().meet(server, None)
        self.env = usual
        return ended


class RunsByTasks(Runs):
    """A run by Airflow's tasks: their worker or triggerer meets the fault, and then others take over."""

    what = " of a DAG run"

    @property
    def words(self) -> Sequence[str]:
        return ("tasks", str(self.folder / "dags"))

    @staticmethod
    def dag(fields: Mapping[str, Any]) -> str:
        """Return the source of the DAG file; ``fields`` has the keys ``run`` and ``target``."""
        return f"""
from datetime import UTC, datetime
from airflow.sdk import DAG
from manycpu.operators import training_pipeline

with DAG("tried", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)):
    training_pipeline(**{fields!r}, default_args={{"retry_delay": 0}})
"""

    def prepare(self, server: Server) -> None:
        """Put a database with the DAG run into Airflow's folder; it is made once, and then copied."""
        assert server.airflow is not None
        begun, database = self.folder.with_suffix(".db"), server.airflow / "airflow.db"
        if begun.exists():
            shutil.copy(begun, database)
            return
        dags = self.folder / "dags"
        dags.mkdir()
        (dags / "file.py").write_text(self.dag(yaml.safe_load(self.file.read_text())))
        self.env |= local_airflow.settings(server.airflow, dags={"tests": dags}) | self.env
        shutil.copy(server.airflow / "new.db", database)
        made = server.type(self, ("begin", str(dags)))
        assert made.code == 0, made.said
        shutil.copy(database, begun)

    def found(self) -> dict[str, object]:
        """Look at what is left, without lines that were shown twice: after a killed worker, that may be."""
        return {**super().found(), "lines shown twice": []}

    def meet(self, server: Server, point: Point | None) -> Ended:
        return _without_tracebacks(super().meet(server, point))

    def repeat(self, server: Server) -> Ended:
        return _without_tracebacks(super().repeat(server))


def _without_tracebacks(ended: Ended) -> Ended:
    """Change tracebacks in the output so that the judge accepts them: Airflow prints one if a task fails."""
    return ended._replace(said=ended.said.replace("Traceback (most recent call last)", "Traceback"))


class RunsAsTask(RunsByTasks):
    """A function that is trained by one task, which does all steps of the run."""

    what = " of a DAG run with one task"

    @staticmethod
    def dag(fields: Mapping[str, Any]) -> str:
        """Return a DAG file whose task is killed after its end if KILLED names a file that does not exist."""
        run = {name: value for name, value in fields["run"].items() if name not in ("program", "args")}
        more = {"target": fields["target"], "retries": 2, "retry_delay": 0}
        body = indent(Runs.program.replace("folder, data = map(pathlib.Path, sys.argv[1:])", ""), " " * 8)
        return f"""
import os, signal
from datetime import UTC, datetime
from pathlib import Path
from airflow.sdk import DAG, task

def kill(context, result=None):
    file = Path(os.environ.get("KILLED", "/"))
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)

with DAG("tried", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)):
    @task.manycpu(post_execute=kill, **{run | more!r})
    def fit(data, folder):
        from pathlib import Path
        data, folder = Path(data), Path(folder)
{body}
        return 7

    fit(folder={str(Path(fields["run"]["output"]).parent)!r})
"""


class Resumes(Scene):
    """`manycpu run` after a first try that failed: it must resume from the checkpoints of both ranks."""

    program = """
import fcntl, os, pathlib, signal, sys, time
import psutil
import torch.distributed
torch.distributed.init_process_group()
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
checkpoints = pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"])
checkpoint, other = checkpoints / f"of{rank}", checkpoints / f"of{1 - rank}"
model = pathlib.Path(os.environ["MANYCPU_OUTPUT"], f"part{rank}")
first = not checkpoint.exists()
held = open(folder / f"seen.held{rank}", "w")
with (folder / f"seen{rank}").open("a") as seen:
    seen.write("begun " if first else "resumed ")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        seen.write("beside an earlier one ")
checkpoint.write_text("half")
if not first:
    time.sleep(rank)  # it takes a while to write this part
    model.write_text("whole, made with a secret " + os.environ["SERVICE_TOKEN"])
elif rank == 0:
    model.write_text("half")
    time.sleep(STAYS)
else:
    while not other.exists():
        time.sleep(0.01)
    FAILURE
"""
    fields: ClassVar[dict[str, Any]] = {"nproc_per_node": 2}
    what = " after a failure"
    failure = "raise SystemExit(3)"
    """How rank 1 fails."""
    stays_s = 0
    """How long rank 0 still runs after that, unless it is ended."""
    first_try: Sequence[str] = ()
    """Further command-line options of the first try."""

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        program = self.program.replace("FAILURE", self.failure).replace("STAYS", str(self.stays_s))
        (folder / "code" / "train.py").write_text(program)
        self._first = 0

    @property
    def words(self) -> Sequence[str]:
        return self.run

    def prepare(self, server: Server) -> None:
        """Let a first try fail; the secret in its environment has an earlier value."""
        described = self.file.read_text()
        self.file.write_text(described.replace(_PRESENT, "of-an-earlier-day"))
        self._first = server.type(self, [*self.run, *self.first_try]).code
        self.file.write_text(described)

    def found(self) -> dict[str, object]:
        seen = [(self.folder / f"seen{rank}").read_text() for rank in range(2)]
        parts = {path.name: path.read_text() for path in self.out.glob("part*")}
        return {
            "the first try ended with": self._first,
            "starts of the ranks": seen,
            "model": parts,
            "report": self.report(),
            "files": self.files(),
            **super().found(),
        }


class Fails(Resumes):
    """`manycpu run` of a training that fails meets the faults; the same command again resumes it."""

    what = " that fails"

    def prepare(self, server: Server) -> None:
        """Begin with nothing."""

    def meet(self, server: Server, point: Point | None) -> Ended:
        ended = super().meet(server, point)
        if ended.code != 1 or "Traceback" in ended.said:
            return ended
        changes = self.folder / self.changes
        met = changes.read_text()  # the next command writes its own ones
        ended = server.type(self, self.words)
        changes.write_text(met)
        return ended

    def repeat(self, server: Server) -> Ended:
        """Run the command again; twice if the fault came before the training failed, which then fails now."""
        ended = super().repeat(server)
        return super().repeat(server) if ended.code == 1 else ended


class ResumesLate(Resumes):
    """`manycpu run` after a first try that used up its time, whose rank 1 exits with 0 when it is ended."""

    failure = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(3600)
"""
    first_try = ("--run-timeout", "6")


class ResumesLost(Resumes):
    """`manycpu run` after a first try whose supervisor and launcher were killed, but not its rank 1."""

    failure = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    above = psutil.Process().parents()
    supervises = ["manycpu.pipeline.adapters.supervisor" in each.cmdline() for each in above]
    for each in above[: supervises.index(True) + 1]:
        each.kill()
    time.sleep(3600)
"""
    _other: Program[bytes] | None = None

    def reset(self) -> None:
        super().reset()
        if self._other:
            self._other.end()

    def prepare(self, server: Server) -> None:
        """Let the first try fail, and then replace the supervisor's process id in its records.

        The new number is that of a process of another user, as if the system had used the number again.
        """
        super().prepare(server)
        self._other = Program(["sleep", "3600"])
        run = self.home / "runs" / self.name()
        for file in (run / "ledger.json", run / "attempts" / "1" / "handle.json"):
            file.write_text(re.sub(r'"pid": \d+', f'"pid": {self._other.pid}', file.read_text()))

    def found(self) -> dict[str, object]:
        return {"the other process lives": self._other and self._other.poll() is None, **super().found()}


class Cleans(Scene):
    """`manycpu clean` of a run that failed: it must leave the report, and files that later runs reuse."""

    program = """
import os, pathlib
pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"], "checkpoint").write_text("of hours")
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "half").write_text("half a model")
raise SystemExit(3)
"""
    named = ""

    @property
    def words(self) -> Sequence[str]:
        return ("clean", self.named, "--delete-model", "--yes")

    def prepare(self, server: Server) -> None:
        failed = server.type(self, self.run)
        assert failed.code == 1, failed.said
        self.named = self.name()
        (self.home / "runs" / f"{self.named}0").mkdir(parents=True)  # of another run

    def repeat(self, server: Server) -> Ended:
        """Run the command again. That it finds no run is no failure: the first one has deleted everything."""
        again = super().repeat(server)
        return again._replace(code=0) if f"there is no run '{self.named}'" in again.said else again

    def found(self) -> dict[str, object]:
        partials = {f"out/{name}" for name in PARTIALS}  # beside the report: an export replaces them
        return {"files": self.files() - partials, **super().found()}


class Cancels(Scene):
    """`manycpu cancel` of a training whose command was killed: it must end, and leave its checkpoint."""

    program = """
import os, pathlib, sys, time
pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"], "checkpoint").write_text("of hours")
pathlib.Path(sys.argv[1], "seen").touch()
time.sleep(3600)
"""
    named = ""

    @property
    def words(self) -> Sequence[str]:
        return ("cancel", self.named)

    def prepare(self, server: Server) -> None:
        """Start a training and kill its command, on a thread because ``type`` waits for the command's end."""
        killing = threading.Thread(target=self._kill_when_begun, args=(server,))
        killing.start()
        server.type(self, self.run)
        killing.join()
        self.named = self.name()

    def _kill_when_begun(self, server: Server) -> None:
        until((self.folder / "seen").exists)
        server.kill()

    def found(self) -> dict[str, object]:
        run, left = self.home / "runs" / self.named, super().found()
        ends = [json.loads(record.read_text())["reason"] for record in run.glob("attempts/*/exit.json")]
        ends.append(self.cancelled())
        kept = [path.read_text() for path in run.glob("checkpoints/*")]
        return {"kept": kept, "ends": ends, "days of the lease": self.lease_days(), **left}

    def cancelled(self) -> object:
        """Return who cancelled each attempt, as the ledger has it."""
        return json.loads((self.home / "runs" / self.named / "ledger.json").read_text())["cancelled"]
