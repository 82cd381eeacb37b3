"""Run ranks under real launchers, for tests."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.killable_programs import Program

from manycpu.pipeline.adapters import mpi
from manycpu.pipeline.launchers import LAUNCHERS as MODULES
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.event_types import EVENTS, decode
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.spec.training_run import TrainingRun

MPIRUNS = {"intel": f"{sys.prefix}/bin/mpirun", "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
LAUNCHERS = ["processes", "torchrun", *MPIRUNS]
_TESTS = Path(__file__).parents[1]
LIGHT_TORCH = _TESTS / "scripts" / "light_torch"
PACKAGE = _TESTS.parent / ".dev"
"""The folder from which tests import manycpu."""
LIGHT = {"PYTHONPATH": f"{LIGHT_TORCH}:{PACKAGE}"}
"""Environment of ranks of this checkout that import a stand-in for torch, so that they start at once."""
PLAIN = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(PACKAGE)}
"""Environment of ranks of this checkout."""

LIMIT = 300  # seconds: enough for a slow or busy machine


class Ended:
    """A command that ended: its exit code, its lines, and the events among them."""

    def __init__(self, code: int, out: str) -> None:
        self.code, self.out = code, out
        self.lines = [events.split(line) for line in out.splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind, each with the rank that wrote it."""
        decoded = [(line.rank, decode(line.text)) for line in self.lines]
        assert not any(event.model_extra for _, event in decoded if event and event.event in EVENTS)
        return [
            {"by": rank, **event.model_dump(exclude_unset=True)}
            for rank, event in decoded
            if event is not None and event.event == kind
        ]

    def texts(self) -> list[str]:
        """Return the lines that are not events."""
        return [line.text for line in self.lines if decode(line.text) is None]


def execute(argv: list[str], env: Mapping[str, str], cwd: Path) -> Ended:
    """Run a command to its end with the environment ``PLAIN`` and ``env``; fail after five minutes."""
    done = subprocess.run(
        argv,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=PLAIN
        | {"TMPDIR": tempfile.gettempdir()}
        # Runs share cores by records in TMPDIR: ranks of other test sessions must not count.
        | dict(env),
        cwd=cwd,
        timeout=LIMIT,
    )
    return Ended(done.returncode, done.stdout.decode(errors="replace"))


def launch(launcher: str, script: Path, *args: str, light: bool = False, **fields: Any) -> Ended:
    """Launch two ranks of a script as a local run does; ``light``: with a stand-in for torch."""
    if light and launcher != "torchrun":
        fields["env"] = LIGHT
    manifest = manifest_of(launcher, script, *args, **fields)
    argv = light_torchrun(manifest["argv"]) if light and launcher == "torchrun" else manifest["argv"]
    return execute(argv, manifest["env"], script.parent)


def light_torchrun(argv: list[str]) -> list[str]:
    """Change a torchrun command: its ranks use a stand-in for torch, and their own store, not torchrun's."""
    own = LIGHT | {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    start = argv.index("--no-python") + 1
    return [*argv[:start], "env", *(f"{name}={value}" for name, value in own.items()), *argv[start:]]


def manifest_of(launcher: str, script: Path, *args: str, **fields: Any) -> dict[str, Any]:
    """Return what a local run launches: ``argv`` and ``env``; ``fields`` are more fields of the run."""
    known = {"nproc_per_node": 2, "start_timeout": 60} | fields
    run = TrainingRun(program=str(script), args=args, output=str(script.parent / "model"), **known)
    target = Local.model_validate({"launch": "mpirun" if launcher in MPIRUNS else launcher})
    folder = str(script.parent)
    placement = Placement(
        name="train-0123456789",
        attempt=1,
        python=sys.executable,
        code=folder,
        program=(str(script),),
        output=f"{folder}/{secrets.token_hex(4)}/output",  # each launch is a separate attempt
        checkpoints=f"{folder}/checkpoints",
        caches=f"{folder}/caches",
        attempt_directory=folder,
        mpi=found(launcher) if launcher in MPIRUNS else None,
        master_port=free_port(),
    )
    made: dict[str, Any] = MODULES[target.launch].objects(run, target, placement)[-1]
    return made


def found(family: str) -> Any:
    """Find an MPI of this machine; skip the test if it is not installed."""
    try:
        return mpi.find(MPIRUNS[family])
    except ManycpuError as error:
        pytest.skip(f"{error} (tests/system-packages)")


def free_port() -> int:
    """Return a free port below the range that the system uses for outgoing connections."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def alone(script: Path, *args: str, **env: str) -> Ended:
    """Run a script as the only rank, without a launcher."""
    return execute([sys.executable, "-m", "manycpu.pipeline.node", str(script), *args], env, script.parent)


def by_hand(script: Path, *ranks: Mapping[str, str]) -> list[Ended]:
    """Start ranks without a launcher, in parallel; each mapping is the environment of a rank."""
    common = PLAIN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": "2", "MANYCPU_START_TIMEOUT": "60"}
    argv = [sys.executable, "-m", "manycpu.pipeline.node", str(script)]
    started: list[Program[bytes]] = [
        Program(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**common, **rank})
        for rank in ranks
    ]
    outs = [process.communicate(timeout=LIMIT)[0].decode() for process in started]
    return [Ended(process.returncode, out) for process, out in zip(started, outs, strict=True)]
