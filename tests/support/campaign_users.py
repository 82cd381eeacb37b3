"""Users of a campaign of faults: each types `manycpu run` until it succeeds, on the test cluster or here."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from cluster import jobs
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes import client
from support.campaign_judge import BOUND_S
from support.cluster_runs import fields_of, target_fields
from support.killable_programs import Program
from support.outside_history import History
from support.rank_launches import LIGHT_TORCH, MPIRUNS
from support.waiting import until

from manycpu.pipeline.spec.placement import CODE

HERE: Final[Mapping[str, Mapping[str, Any]]] = {
    "processes": {"launch": "processes"},
    "torchrun": {"launch": "torchrun"},
    "mpirun": {"launch": "mpirun", "mpi": MPIRUNS["intel"]},
}
"""Kinds of run on this machine."""
THERE: Final = ("static", "elastic", "intel", "trainjob", "trainjob-intel")
"""Kinds of run on the cluster: keys of ``LAUNCHES``."""
_PROGRAM: Final = Path(__file__).parents[1] / "scripts" / "campaign_train.py"
LIGHT_KINDS: Final = ("processes", "mpirun", "intel", "trainjob-intel")
"""Kinds whose launcher is not torch's own: a stand-in for torch lets them start at once."""
_OTHERS_S: Final = 120  # by which faults that other users meet may delay the end of a command
_BUDGETS: Final = {"run_timeout": 300, "queue_timeout": 600, "start_timeout": 300}


@dataclass(frozen=True)
class Round:
    """What the users of a round, who are active at the same time, share."""

    cluster: TestCluster
    space: Space
    faults: Faults
    folder: Path
    history: History
    url: str
    """URL of the server to which ranks post lines of the history."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the commands."""
    one_for_all: threading.Lock = field(default_factory=threading.Lock)
    """Held while a fault strikes the whole cluster, so that there is only one at a time."""

    @property
    def home(self) -> Path:
        """The folder of runs on this machine."""
        return self.folder / "home"

    def objects(self) -> dict[str, str]:
        """Return the objects in the namespace and the folders of runs: kind and name -> uid or inode."""
        assert self.cluster.own is not None
        kinds = "configmaps,secrets,persistentvolumeclaims,pods,services,serviceaccounts,roles,rolebindings,"
        kinds += "networkpolicies,jobs,pytorchjobs,mpijobs,trainjobs,jobsets,trainingruntimes"
        words = ("--namespace", self.space.name, "get", kinds, "--output", "json")
        items = json.loads(self.cluster.own.kubectl(*words))["items"]
        there = {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"] for item in items}
        here = (path for path in (self.home / "runs").glob("[!.]*"))
        return there | {f"runs/{path.name}": str(path.stat().st_ino) for path in here}


class User:
    """A person who types `manycpu run`, and types it again until it succeeds.

    Args:
        at: The round.
        name: Name of the user, which is also the run id and an argument of its ranks.
        kind: Kind of the run: one of ``HERE`` or ``THERE``.
        rng: Draws the user's data, number of steps, and choices of faults.
    """

    def __init__(self, at: Round, name: str, kind: str, rng: random.Random) -> None:
        self.at, self.name, self.kind, self.rng = at, name, kind, rng
        self.folder, self.out = at.folder / name, at.folder / name / "out"
        self.decoys: dict[str, str] = {}
        """Objects of others, with names like those of this run: kind and name -> uid or inode."""
        steps = rng.choice((12, 24, 40))
        (self.folder / "code").mkdir(parents=True)
        (self.folder / "data").mkdir()
        program = self.folder / "code" / "train.py"
        program.write_text(_PROGRAM.read_text())
        (self.folder / "data" / "x").write_bytes(rng.randbytes(rng.choice((1_000, 8_000_000))))
        if kind in LIGHT_KINDS:
            shutil.copytree(LIGHT_TORCH, program.parent / "light")
        run = {"program": str(program), "job_name": name, "args": [name, at.url, str(steps)], **_BUDGETS}
        run |= {"data": str(self.folder / "data"), "output": str(self.out)}
        here = f"{program.parent}/light:{Path(__file__).parents[2]}/.dev"
        run["env"] = {"PYTHONPATH": here if kind in HERE else f"{CODE}/light"}
        target, more = self._target()
        self.file = self.folder / "run.yaml"
        self.file.write_text(yaml.safe_dump({"run": run | more, "target": target}))
        worlds = (1, 2) if kind == "elastic" else (2,)
        at.history.add("user", run=name, kind=kind, steps=steps, worlds=worlds)

    def _target(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of the target, and those of the run that belong to its kind."""
        if self.kind in HERE:
            where = {"kind": "local", "directory": str(self.at.home), **HERE[self.kind]}
            return where, {"nproc_per_node": 2, "oversubscribe": True}
        where, how = fields_of(self.kind, self.at.cluster)
        how = {"nnodes": 2, "nproc_per_node": 1, "resources": {"cpu": 0.3, "memory": "700Mi"}} | how
        return target_fields(self.at.cluster, self.at.space) | where, how

    @property
    def location(self) -> list[str]:
        """Options that say where the run is."""
        if self.kind in HERE:
            return ["--directory", str(self.at.home)]
        return ["--namespace", self.at.space.name, "--connection", str(self.at.space.kubeconfig)]

    def type(self, number: str) -> "Command":
        """Start `manycpu run`, always with the same arguments; ``number`` identifies it in the history."""
        return Command(self, number, ["run", str(self.file), "--run-id", self.name])

    def other(self, *words: str) -> str:
        """Run another command of manycpu to its end; return its last line, or an empty text if it failed."""
        command = Command(self, words[0], [*words, *self.location])
        return command.last if command.end() == 0 else ""

    def see_name(self, command: "Command") -> str:
        """Wait until the command has printed the run's name, and return it; empty: it ended before that."""
        until(lambda: command.name or command.ended)
        return command.name

    def place_decoys(self, run: str) -> None:
        """Create what other users might have: objects, or a run's folder, with names like that of ``run``."""
        place, similar = self.at.space.by_admin, self.at.home / "runs" / f"{run}0"
        if self.kind in HERE:
            similar.mkdir(parents=True)
            self.decoys[f"runs/{similar.name}"] = str(similar.stat().st_ino)
        else:
            pod = jobs.pod(f"{run}-1-worker-00", self.at.cluster.image("helper"), "true", node="nowhere")
            pod["metadata"]["labels"] = {"manycpu/run": f"{run}0"}
            made_here: list[dict[str, Any]] = [
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{run}0"}},
                {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{run}-env0"}},
                pod,
            ]
            owners = list[dict[str, str]]()  # of the others: the first one, like the ledger of another run
            for manifest in made_here:
                manifest["metadata"]["ownerReferences"] = owners
                made = place.create(manifest)["metadata"]
                self.decoys[f"{manifest['kind']}/{made['name']}"] = made["uid"]
                named = {"name": made["name"], "uid": made["uid"]}
                owners = owners or [{"apiVersion": "v1", "kind": manifest["kind"], **named}]
        self.at.history.add("decoys", objects=self.decoys)

    def look(self) -> None:
        """Add to the history what the run's output holds: the model and the report."""
        report = json.loads((self.out / "report.json").read_text())
        blob, total = self.out / "blob.bin", self.out / "sum.txt"
        self.at.history.add(
            "found",
            run=self.name,
            digest=hashlib.sha256(blob.read_bytes()).hexdigest() if blob.exists() else None,
            sum=int(total.read_text()) if total.exists() else None,
            state=report["state"],
            world=report["world_size"],
            left_behind=report["left_behind"],
            attempts=report["attempts"],
        )


class Command:
    """A command of manycpu that a user has typed; it runs in its own session."""

    def __init__(self, user: User, number: str, words: list[str]) -> None:
        self.user, self.number, self.verb = user, number, words[0]
        self.history = user.at.history
        self._log = user.folder / f"said-{number}"
        env = os.environ | user.at.env | {"MANYCPU_HOME": str(user.at.home)}
        argv = [sys.executable, "-m", "manycpu.pipeline.cli", *words]
        self.begun = self.history.now()
        with self._log.open("w") as said:
            self.program = Program(
                argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env, start_new_session=True
            )

    @property
    def ended(self) -> bool:
        return self.program.poll() is not None

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def last(self) -> str:
        """The last line that it has printed."""
        return ([line for line in self.said.splitlines() if line.strip()] or [""])[-1]

    @property
    def name(self) -> str:
        """The name of the run that the command has told; empty: not yet."""
        found = re.search(r"^run (\S+) \(--run-id", self.said, re.MULTILINE)
        return found[1] if found else ""

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so many seconds; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.program.wait(seconds)
        return self.ended

    def end(self) -> int | None:
        """Wait for its end, and add it to the history; return its exit code.

        None: it did not end in time, and was killed.
        """
        code = self.program.returncode if self.wait(BOUND_S + _OTHERS_S) else None
        self.program.end()
        self.history.add(
            "ended",
            run=self.user.name,
            verb=self.verb,
            number=self.number,
            begun=self.begun,
            code=code,
            said=self.said[-4000:],
            last=self.last,
        )
        return code


def pods_of(user: User, run: str, label: str) -> list[client.V1Pod]:
    """List the pods of a run that have a label ``manycpu/...``: those of its job have ``role``."""
    return user.at.space.by_admin.pods(f"manycpu/run={run},manycpu/{label}")
