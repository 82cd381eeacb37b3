"""Scenes of trials on a simulated cluster, with faults at the requests to it and to the registry."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import yaml
from support import registry_server
from support.exec_streams import PodForks
from support.fake_api_server import Object
from support.fault_judge import Ended, Point
from support.fault_scenes import (
    OTHER,
    Cancels,
    Cleans,
    Fails,
    Resumes,
    ResumesLate,
    Runs,
    RunsAfterClockJump,
    RunsAfterClockJumpBack,
    RunsAfterLostModel,
    RunsByTasks,
    Scene,
    Server,
)
from support.fault_trials import Team
from support.rank_launches import PACKAGE
from support.registry_images import push_base
from support.request_faults import BESIDE, CRASHES, HARMLESS, Requests, faults_of, is_change, object_of
from support.simulated_cluster import SimulatedCluster, serving

from manycpu.pipeline.targets.kubernetes.build import code_tree
from manycpu.pipeline.targets.kubernetes.image.layers import library
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.program_code import program_of

_VARYING = re.compile(r"(?<=^/)[0-9]+/|(?<=/uploads/)[^?]+|_state=[^&]*|(?<=sha256)(%3A|:)[0-9a-f]+")
_NAME = "NAME"
"""Replaces the run's name in the names of requests, because each folder has another run."""
_BYSTANDER = "bystander"
"""Name of objects in the same namespace that belong to no run."""
_SILENT_S = 7  # longer than a command waits for the last lines of a log
_DIGITS = 12  # of a digest, in the tag of an image


class Place:
    """A simulated cluster behind a web server, and the faults that requests to it meet."""

    def __init__(self, server: Server) -> None:
        self.server = server
        """Runs the command that sends the requests."""
        self.current: dict[str, SimulatedCluster] = {}
        """The key ``cluster`` has the cluster of the present trial."""
        self.requests = Requests(
            {
                "kill": lambda _: self.server.kill(),
                "silence": lambda _: self.cluster.wait_for_ranks(_SILENT_S),
                "replaced": lambda request: self.cluster.replace(*object_of(request)),
                "bystander": lambda _: self.cluster.remove("Pod", _BYSTANDER),
                "touched": lambda _: self.cluster.touch("ConfigMap", _BYSTANDER),
                **{fault: lambda _: self.beside() for fault in BESIDE},
            }
        )
        self.beside: Callable[[], None] = lambda: None
        """Runs another command on the same run, as the fault of a request."""
        self.url = ""
        self.library = PACKAGE
        """The folder from which pods import manycpu."""
        self.forks = PodForks(self.library)

    def import_from(self, library: Path) -> None:
        """Let pods import manycpu from another folder from now on."""
        self.forks.end()
        self.library, self.forks = library, PodForks(library)

    @property
    def cluster(self) -> SimulatedCluster:
        return self.current["cluster"]


@contextmanager
def registry(folder: Path, at: Place) -> Iterator[str]:
    """Run a registry with a base image; yield its host and port. Requests to it meet the faults of ``at``."""
    with registry_server.running(folder) as host:
        push_base(host)

        def answer(handler: BaseHTTPRequestHandler) -> None:
            path = _VARYING.sub("", handler.path.removeprefix("/v2"))
            named = f"registry {handler.command} {path}"
            at.requests.answer(handler, named, lambda: registry_server.pass_on(host, handler))

        with registry_server.relayed(answer) as relay:
            yield relay


@contextmanager
def place(server: Server) -> Iterator[Place]:
    """Serve a simulated cluster while the block runs, for the commands that ``server`` runs."""
    made = Place(server)
    with serving(made.current) as made.url:
        try:
            yield made
        finally:
            for cluster in made.current.values():
                cluster.end()
            made.forks.end()


def teams(made: Callable[..., Scene], folder: Path, places: Sequence[Place], *how: str | None) -> list[Team]:
    """Make the same scene in each place; return pairs of the scene and the server of its commands."""
    return [
        (made(folder / f"scene{number}", place, *how), place.server) for number, place in enumerate(places)
    ]


class OnCluster(Scene):
    """A scene on a simulated cluster, where other users have objects with names like those of the run."""

    endures = True
    harmless = HARMLESS
    concerns = ""
    """Only requests whose names begin like this meet faults."""
    identity: tuple[object, ...] = ("cli", "x")
    """The run's identity, from which its key is made."""
    connection = ""
    """Id of the Airflow connection to the cluster; empty: a kubeconfig file is used."""

    def __init__(
        self, folder: Path, at: Place, claim: str | None = "data", launch: str = "pytorchjob"
    ) -> None:
        self.at, self.volume = at, folder / "volume"
        self._others: dict[str, str] = {}  # kind and name of an object of other users -> resource version
        self.where = f"{launch}, {'a claim that is given' if claim else 'a claim of its own'}"
        kubeconfig = folder / "kubeconfig"
        target: dict[str, Any] = {"kind": "kubernetes", "namespace": "ml"}
        target |= {"connection": self.connection or str(kubeconfig)}
        target |= {"mount_path": str(self.volume), "direct": not claim, "pull_policy": "Never"}
        target |= {"launch": launch} | ({"runtime": "own"} if launch == "trainjob" else {})
        target |= {"claim": claim} if claim else {}
        super().__init__(folder, target | {"image": "train:1"})
        if self.connection:
            fields = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(kubeconfig)}}
            self.env[f"AIRFLOW_CONN_{self.connection.upper()}"] = json.dumps(fields)
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(at.url)))
        described = yaml.safe_load(self.file.read_text())
        ctx: Any = open_context(described["run"], described["target"], *self.identity, base=folder)
        root, program = program_of(ctx)
        assert root
        digests = [library().digest, code_tree(ctx, root, program).digest]
        self.have_image_of(*digests)
        self.named, self.claim = str(ctx.name), claim
        self.location = ("--namespace", "ml", "--connection", str(kubeconfig))

    def import_from(self, library: Path) -> None:
        self.at.import_from(library)

    def have_image_of(self, *digests: str) -> None:
        """Add digests to the tag of the image: the tag says what an image holds, so it needs no build."""
        described = yaml.safe_load(self.file.read_text())
        tag = described["target"]["image"]
        described["target"]["image"] = "-".join([tag, *(digest[:_DIGITS] for digest in digests)])
        self.file.write_text(yaml.safe_dump(described))

    def reset(self) -> None:
        if self.at.current:
            self.at.cluster.end()
        shutil.rmtree(self.volume, ignore_errors=True)
        cluster = self.at.current["cluster"] = SimulatedCluster(
            self.folder, self.at.requests, self.at.forks, self.at.library
        )
        super().reset()
        self.at.requests.plan()
        self._put_similar_run(cluster)
        there = [(kind, one["metadata"]) for kind, all_ in cluster.objects.items() for one in all_]
        self._others = {
            f"{kind}/{meta['name']}": meta["resourceVersion"]
            for kind, meta in there
            if meta["name"] != _BYSTANDER
        }
        if self.claim:
            spec = {"accessModes": ["ReadWriteMany"]}
            meta = {"name": self.claim}
            cluster.put(
                "PersistentVolumeClaim", {"metadata": meta, "spec": spec, "status": {"phase": "Bound"}}
            )

    def _put_similar_run(self, cluster: SimulatedCluster) -> None:
        """Make objects with names like those of this run; their ledger has a name like that of its ledger."""
        labels, owners = {"manycpu/run": f"{self.named}0"}, list[dict[str, str]]()
        spec: dict[str, Any] = {"pytorchReplicaSpecs": {}, "containers": []}
        for kind in ("ConfigMap", "Pod", "PyTorchJob", "Secret"):
            for name in (f"{self.named}0", f"{self.named}-10", f"{self.named}-stage0", _BYSTANDER):
                meta = {"name": name, "labels": labels, "ownerReferences": owners}
                uid = cluster.put(kind, {"metadata": meta, "spec": spec})["metadata"]["uid"]
                owners = owners or [{"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}]

    def put_other_run(self) -> None:
        """Make a run of another user. It is kept for two days: the clock of a command jumps by more."""
        entry, labels = self.other_entry(), {"manycpu/part": "ledger", "manycpu/run": OTHER}
        until = f"{time.time() + 2 * 86_400:.0f}"
        kept = {"manycpu/kept-until": until, "manycpu/ended": "true", "manycpu/kept": "true"}
        meta = {"name": OTHER, "labels": labels | {"manycpu/key": entry["key"]}, "annotations": kept}
        data = {name: json.dumps(value) for name, value in entry.items()}
        self.at.cluster.put("ConfigMap", {"metadata": meta, "data": data})
        for name in (OTHER, f"{self.named}0") if self.claim else ():
            folder = self.volume / "manycpu" / "runs" / name / "checkpoints"
            folder.mkdir(parents=True)
            (folder / "checkpoint").write_text("of hours")

    def meet(self, server: Server, point: Point | None) -> Ended:
        fault, request = point or ("", "")
        self.at.server = server
        self.at.requests.plan(fault, request.replace(_NAME, self.named))
        return server.type(self, self.words)

    def places(self) -> list[str]:
        seen = [request for request in self.at.requests.seen if request.startswith(self.concerns)]
        return [request.replace(self.named, _NAME) for request in seen]

    def struck(self, point: Point) -> bool:  # noqa: ARG002 - it is the one that was planned
        return self.at.requests.struck

    @staticmethod
    def points(places: Sequence[str], *, crashes: bool) -> list[Point]:
        once = [one for one in places if "selfsubject" not in one or one.endswith("#1")]
        return [
            (fault, request)
            for request in once
            for fault in ((CRASHES if is_change(request) else ()) if crashes else faults_of(request))
        ]

    def found(self) -> dict[str, object]:
        """Look at what is left in the cluster, and at the objects of other users.

        An object that a fault put in the place of a run's object must stay, and is not counted as left.
        """
        cluster = self.at.cluster
        items = [(kind, one["metadata"]) for kind, all_ in cluster.objects.items() for one in all_]
        objects = {f"{kind}/{meta['name']}" for kind, meta in items if meta["name"] != _BYSTANDER}
        deleted = [one for one in cluster.deleted if one in self._others]
        present = {f"{kind}/{meta['name']}": meta["resourceVersion"] for kind, meta in items}
        changed = [one for one, version in self._others.items() if present.get(one, version) != version]
        return {
            "objects": frozenset(objects - cluster.replaced),
            "deleted objects of others": [*deleted, *sorted(cluster.replaced - objects)],
            "changed objects of others": changed,
            **super().found(),
        }

    def name(self) -> str:
        return self.named

    def lease_days(self) -> int:
        ledger = self._ledger()
        until = int(ledger["metadata"]["annotations"]["manycpu/kept-until"])
        return int((until - json.loads(ledger["data"]["created"])) / 86_400)

    def _ledger(self) -> Object:
        found = self.at.cluster.named("ConfigMap", self.named)
        assert found
        return found


class RunsThere(OnCluster, Runs):
    """`manycpu run`, on the cluster."""


class RunsAfterClockJumpThere(OnCluster, RunsAfterClockJump):
    """`manycpu run` on the cluster, killed, and typed again when the machine's clock has jumped ahead."""


class RunsAfterClockJumpBackThere(OnCluster, RunsAfterClockJumpBack):
    """`manycpu run` on the cluster, killed, and typed again when the machine's clock has jumped back."""


class RunsAfterLostModelThere(OnCluster, RunsAfterLostModel):
    """`manycpu run` on the cluster, killed, and typed again after somebody deleted the model."""


class RunsByTasksThere(OnCluster, RunsByTasks):
    """A run by Airflow's tasks, on the cluster: a worker or a triggerer sends the requests."""

    identity = ("tests", "tried", "of-a-trial", "training", -1)
    connection = "simulated"


class RunsWithFaultsInPods(RunsThere):
    """`manycpu run`, whose helper pods meet the faults: it must succeed even if their program is killed."""

    what = ", with faults in helper pods"
    changes = "said.pods"
    places, struck, points = Scene.places, Scene.struck, staticmethod(Scene.points)

    def meet(self, server: Server, point: Point | None) -> Ended:
        fault, place = point or ("", "0")
        self.endures = fault.startswith("kill")
        self.at.forks.plan(fault, int(place.split()[0]), str(self.folder / self.changes))
        ended = super().meet(server, None)
        self.at.forks.plan()
        return ended


class RunsBesideThere(RunsThere):
    """`manycpu run`, which waits at one of its requests until another command on the same run has ended.

    If the other command is `run` too, one of them may begin after the other has ended. Then the run may train
    twice, but never at the same time.
    """

    program = f"""
import os, pathlib, sys
alone = pathlib.Path(sys.argv[1], "seen.alone")
try:
    alone.touch(exist_ok=False)
except FileExistsError:
    alone.with_name("seen.two").touch()
{Runs.program}
alone.unlink()
"""
    what = " beside another command"
    _word, _other = "", Ended(0, "")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._typing = threading.Lock()

    def meet(self, server: Server, point: Point | None) -> Ended:
        self._word, self._other = point[0].split()[1] if point else "", Ended(0, "")
        self.endures = self._word != "cancel"
        self.at.beside = self._type_other
        ended = super().meet(server, point)
        with self._typing:  # the other command must have ended too: this one does not wait for a slow one
            return ended

    def _type_other(self) -> None:
        words = self.words if self._word == "run" else (self._word, self.named, *self.location)
        words = (*words, "--yes") if self._word == "clean" else words
        with self._typing:
            self._other = self.at.server.beside.type(self, words)

    def found(self) -> dict[str, object]:
        """Look at what is left, and judge how the other command ended."""
        code, said = self._other
        is_well = code in (0, 1, 2) and "Traceback" not in said
        found = super().found()
        if self._word != "clean" and found["trained"] == 2:
            found["trained"] = 1
        together = (self.folder / "seen.two").exists()
        if self._word == "cancel":  # a cancelled training leaves its file, and not all its lines are shown
            found["lines not shown"], together = [], False
        ended = "well" if is_well else f"with {code}: {said[-500:]}"
        return {"the other command ended": ended, "two trainings at a time": together, **found}


class ResumesThere(OnCluster, Resumes):
    """`manycpu run` after a first try that failed, on the cluster."""

    fields: ClassVar[dict[str, Any]] = {"nnodes": 2, "nproc_per_node": 1}


class ResumesLateThere(ResumesThere, ResumesLate):
    """`manycpu run` after a first try that used up its time, on the cluster."""


class ResumesBesideThere(ResumesThere):
    """`manycpu run` after a first try whose rank 0 still runs, because the pods of a failed run are kept."""

    fields: ClassVar[dict[str, Any]] = ResumesThere.fields | {"keep": "on_failure"}
    stays_s = 3600


class FailsThere(Fails, ResumesThere):
    """`manycpu run` of a training that fails, on the cluster."""


class Pushes(RunsThere):
    """`manycpu run` with a registry, which has only the base of the image."""

    concerns = "registry "
    what = " with a registry"
    registry = ""
    """The registry's host and port."""
    _trial = 0

    def report(self) -> list[object]:
        return super().report()[:-1]  # the image is in another repository each time

    def reset(self) -> None:
        super().reset()
        described = yaml.safe_load(self.file.read_text())
        self._trial += 1
        images = {
            "image": f"http://{self.registry}/base:1",
            "registry": f"http://{self.registry}/{self._trial}",
        }
        described["target"] |= images | {"pull_policy": "IfNotPresent"}
        self.file.write_text(yaml.safe_dump(described))


class CleansThere(OnCluster, Cleans):
    """`manycpu clean`, on the cluster."""

    @property
    def words(self) -> Sequence[str]:
        return (*super().words, *self.location)


class CancelsThere(OnCluster, Cancels):
    """`manycpu cancel`, on the cluster."""

    @property
    def words(self) -> Sequence[str]:
        return (*super().words, *self.location)

    def found(self) -> dict[str, object]:
        kept = [path.read_text() for path in self.volume.glob(f"**/{self.named}/**/checkpoint")]
        return super().found() | {"kept": kept}

    def cancelled(self) -> object:
        return self._ledger()["data"].get("cancelled.1")


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": url}}],
        "users": [{"name": "x", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
