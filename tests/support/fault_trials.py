"""Trials of faults, here or on a host: start a command, kill it or give it an error, look at what is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from support.fault_judge import Ended, breaches, points
from support.killable_programs import Program
from support.namespace_hosts import Host
from support.rank_launches import LIGHT
from support.waiting import processes_of, until

from manycpu.pipeline.adapters.commands import end
from manycpu.pipeline.spec.output import PARTIALS

SCRIPT: Final = Path(__file__).parents[1] / "scripts" / "fault_at.py"
ALL: Final = os.environ.get("MANYCPU_FAULTS") == "all"
"""Whether there is a trial at every change, as in `make faults`; else at a few."""
_SECONDS: Final = 150  # after which a command is taken for one that never ends
_RUN_ID: Final = "x"


class Scene(ABC):
    """A command, what it finds, and what to look at after it; all of it below one folder."""

    def __init__(
        self, folder: Path, target: Mapping[str, Any] | None = None, host: Host | None = None
    ) -> None:
        target = target or {"kind": "local", "directory": str(folder / "home")}
        self.folder, self.out, self.host = folder, folder / "out", host
        self.home = Path(target.get("directory", folder / "home"))
        self.env = {"MANYCPU_HOME": str(self.home)}
        inputs = folder / "code" / "train.py", folder / "data" / "one", folder / "data" / "more" / "two"
        for file in inputs:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.program if file.suffix else f"some data: {file.name}")
        run: dict[str, Any] = {"program": str(inputs[0]), "args": [str(folder)], "data": str(folder / "data")}
        run |= {"output": str(self.out), "nproc_per_node": 1, "backend": "gloo", "env": LIGHT}
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump({"run": run, "target": target}))
        self.run = ("run", str(self.file), "--run-id", _RUN_ID)

    program: str
    """Of the training."""
    planted = ""
    """A bug of its commands, from planted_bugs.py."""

    @property
    @abstractmethod
    def words(self) -> Sequence[str]:
        """The command that meets the fault."""

    def prepare(self, server: "Server") -> None:  # noqa: B027 - most begin with nothing
        """Bring about what the command finds."""

    def reset(self) -> None:
        """End and delete what an earlier trial left."""
        end(list(processes_of(self.folder)))
        for path in (self.home, self.out, *self.folder.glob("seen*"), *self.folder.glob(".*")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.host:
            self.host.run("rm", "-rf", str(self.home))

    def found(self) -> dict[str, object]:
        """Look at what the command has left."""
        with suppress(AssertionError):  # a supervisor ends just after its exit record
            until(lambda: not self._processes(), 30)
        return {"processes": self._processes()}

    def _processes(self) -> list[str]:
        here = [str(process) for process in processes_of(self.folder)]
        return [*here, *(self.host.processes().values() if self.host else ())]

    def files(self) -> frozenset[str]:
        """List all files here and on the host."""
        inside = [path for root in {self.folder, self.home} for path in root.rglob("*")]
        paths = [os.path.relpath(path, self.folder) for path in inside if not path.name.startswith("said")]
        if self.host:
            there = self.host.run("sh", "-c", f"mkdir -p '{self.home}' && find '{self.home}' -mindepth 1")
            paths += [f"host:{path}" for path in there.splitlines()]
        return frozenset(paths)

    def repeat(self, server: "Server") -> Ended:
        """Type the command again, without a fault."""
        return server.type(self, self.words)

    def name(self) -> str:
        """The name of the run."""
        (folder,) = (self.home / "runs").glob("train-*")
        return folder.name


class Runs(Scene):
    """`manycpu run`: it trains once, and its model, its green report and what later runs reuse are left."""

    program = """
import os, pathlib, sys, uuid
token = uuid.uuid4().hex
with pathlib.Path(sys.argv[1], "seen").open("a") as seen:
    seen.write(token + "\\n")
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text(token)
"""

    @property
    def words(self) -> Sequence[str]:
        return self.run

    def found(self) -> dict[str, object]:
        seen, model, file = self.folder / "seen", self.out / "model.txt", self.out / "report.json"
        trained = seen.read_text().split() if seen.exists() else []
        report = json.loads(file.read_text()) if file.exists() else {}
        return {
            "trained": len(trained),
            "model of the training": model.exists() and [model.read_text()] == trained[-1:],
            "report": [report.get("state"), report.get("left_behind"), report.get("kept")],
            "files": self.files(),
            **super().found(),
        }


class Cleans(Scene):
    """`manycpu clean` of a run that failed: its report is left, and what later runs reuse."""

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

    def prepare(self, server: "Server") -> None:
        failed = server.type(self, self.run)
        assert failed.code == 1, failed.said
        self.named = self.name()

    def repeat(self, server: "Server") -> Ended:
        """Type it again; where all is deleted but the last report is not written, it finds no run."""
        again = super().repeat(server)
        return again._replace(code=0) if f"there is no run '{self.named}'" in again.said else again

    def found(self) -> dict[str, object]:
        partials = {f"out/{name}" for name in PARTIALS}  # beside the report: an export replaces them
        return {"files": self.files() - partials, **super().found()}


class Cancels(Scene):
    """`manycpu cancel` of a training whose command was killed: it ends, and its checkpoint is left."""

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

    def prepare(self, server: "Server") -> None:  # noqa: ARG002 - the server waits for its commands
        argv, env = [sys.executable, "-m", "manycpu.pipeline.cli", *self.run], os.environ | self.env
        with Program(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
            until((self.folder / "seen").exists)
            os.kill(started.pid, signal.SIGKILL)
            started.wait()
        self.named = self.name()

    def found(self) -> dict[str, object]:
        run, left = self.home / "runs" / self.named, super().found()
        ends = [json.loads(record.read_text())["reason"] for record in run.glob("attempts/*/exit.json")]
        return {"kept": [path.read_text() for path in run.glob("checkpoints/*")], "ends": ends, **left}


class Server:
    """Runs commands in forks of one process that has imported everything: a command takes half the time."""

    def __init__(self, program: Program[str]) -> None:
        self._program = program

    def kill(self) -> None:
        """Kill the command that runs."""
        for command in psutil.Process(self._program.pid).children():
            command.kill()

    def type(self, scene: Scene, words: Sequence[str], fault: str = "kill", count: int = 0) -> Ended:
        """Run a command of a scene to its end, with a fault at its ``count``-th change; 0: without."""
        log = scene.folder / "said"
        log.write_text("")
        given = {"fault": fault, "count": count, "words": words, "env": scene.env, "seconds": _SECONDS}
        given |= {"folder": str(scene.folder), "log": str(log), "planted": scene.planted}
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(given) + "\n")
        stdin.flush()
        return Ended(int(stdout.readline()), log.read_text(errors="replace"))


@contextmanager
def server(target: str = "machines") -> Iterator[Server]:
    """Start a server for a kind of target; it ends with the block."""
    argv = [sys.executable, str(SCRIPT), "serve", target]
    with Program(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        yield Server(program)


def tried(scene: Scene, server: Server, faults: Sequence[str], few: int) -> list[str]:
    """Try a scene's command with faults; return the breaches, each with its fault and its change."""
    log, failed = scene.folder / "said.changes", []
    scene.reset()
    scene.prepare(server)
    without = server.type(scene, scene.words)
    assert without.code == 0, without.said
    expected, changes = scene.found(), log.read_text().splitlines()
    chosen = points(changes, faults, None if ALL else few)
    for fault, number in chosen:
        scene.reset()
        scene.prepare(server)
        first = server.type(scene, scene.words, fault, number)
        change = (log.read_text().splitlines()[number - 1 : number] or ["it ended before"])[0]
        again = first if first.code == 0 else scene.repeat(server)
        wrong = breaches(first, again, scene.found(), expected)
        change = change.replace(f"{scene.folder}/", "")
        print(f"{fault} {number} {change}:", "; ".join(wrong) or f"well ({first.code})", flush=True)  # noqa: T201
        failed += [f"{fault} at change {number}, {change}: {'; '.join(wrong)}"] if wrong else []
    scene.reset()
    print(f"{len(changes)} changes, {len(chosen)} trials, {len(failed)} breaches")  # noqa: T201
    return failed
