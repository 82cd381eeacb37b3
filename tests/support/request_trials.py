"""Trials of faults at requests: whole runs on a simulated cluster, each with one fault at one request."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from support import registry_server
from support.exec_streams import PodForks
from support.fault_judge import Found, breaches
from support.fault_trials import ALL, Cancels, Cleans, Runs, Scene, Server
from support.registry_images import push_base
from support.request_faults import CRASHES, Requests, faults_of, is_change
from support.simulated_cluster import SimulatedCluster, serving

from manycpu.pipeline.targets.kubernetes.build import code_tree
from manycpu.pipeline.targets.kubernetes.image.layers import library
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.program_code import program_of

_VARYING = re.compile(r"(?<=^/)[0-9]+/|(?<=/uploads/)[^?]+|_state=[^&]*|(?<=sha256)(%3A|:)[0-9a-f]+")
_REPLAYED = os.environ.get("MANYCPU_FAULTS", "").partition(" at ")[::2]
"""The fault and the request of the only trial; without a request, there are others."""
_DIGITS = 12  # of a digest, in the tag of an image


class Place:
    """A simulated cluster that is served, and what kills the command that calls it."""

    def __init__(self, server: Server) -> None:
        self.requests, self.forks = Requests(server.kill), PodForks()
        self.current: dict[str, SimulatedCluster] = {}
        self.url = ""

    @property
    def cluster(self) -> SimulatedCluster:
        return self.current["cluster"]


@contextmanager
def registry(folder: Path, at: Place) -> Iterator[str]:
    """Run a registry with a base image, whose requests meet faults too; yield host and port."""
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
    """Serve a simulated cluster for the commands of a server."""
    made = Place(server)
    with serving(made.current) as made.url:
        try:
            yield made
        finally:
            for cluster in made.current.values():
                cluster.end()
            made.forks.end()


class OnCluster(Scene):
    """A scene on a simulated cluster, where others have objects of similar names."""

    concerns = ""
    """How the requests begin that meet faults."""

    def __init__(self, folder: Path, at: Place, claim: str | None = None, launch: str = "pytorchjob") -> None:
        self.at, self.volume = at, folder / "volume"
        kubeconfig = folder / "kubeconfig"
        target: dict[str, Any] = {"kind": "kubernetes", "namespace": "ml", "connection": str(kubeconfig)}
        target |= {"mount_path": str(self.volume), "direct": False, "pull_policy": "Never"}
        target |= {"launch": launch, "runtime": "own"} if launch == "trainjob" else {}
        target |= {"claim": claim} if claim else {}
        super().__init__(folder, target | {"image": "train:1"})
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(at.url)))
        described = yaml.safe_load(self.file.read_text())
        ctx: Any = open_context(described["run"], described["target"], "cli", "x", base=folder)
        root, program = program_of(ctx)
        assert root
        trees = library(), code_tree(ctx, root, program)
        described["target"]["image"] = "train:" + "-".join(tree.digest[:_DIGITS] for tree in trees)
        self.file.write_text(yaml.safe_dump(described))
        self.named, self.claim = str(ctx.name), claim
        self.where = ("--namespace", "ml", "--connection", str(kubeconfig))

    def reset(self) -> None:
        if self.at.current:
            self.at.cluster.end()
        super().reset()
        shutil.rmtree(self.volume, ignore_errors=True)
        cluster = self.at.current["cluster"] = SimulatedCluster(self.folder, self.at.requests, self.at.forks)
        self.at.requests.plan()
        for kind in ("ConfigMap", "Pod", "PyTorchJob", "Secret"):
            for name in (f"{self.named}0", f"{self.named}-10", f"{self.named}-stage0"):
                labels = {"manycpu/run": f"{self.named}0"}
                spec: dict[str, Any] = {"pytorchReplicaSpecs": {}, "containers": []}
                cluster.put(kind, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        if self.claim:
            spec = {"accessModes": ["ReadWriteMany"]}
            meta = {"name": self.claim}
            cluster.put(
                "PersistentVolumeClaim", {"metadata": meta, "spec": spec, "status": {"phase": "Bound"}}
            )

    def found(self) -> dict[str, object]:
        items = [(kind, one["metadata"]) for kind, all_ in self.at.cluster.objects.items() for one in all_]
        objects = [f"{kind}/{meta['name']}" for kind, meta in items]
        return {"objects": frozenset(objects), "deleted decoys": self._deleted_decoys(), **super().found()}

    def _deleted_decoys(self) -> list[str]:
        names = {f"{self.named}0", f"{self.named}-10", f"{self.named}-stage0"}
        return [one for one in self.at.cluster.deleted if one.partition("/")[2] in names]

    def name(self) -> str:
        return self.named


class RunsThere(OnCluster, Runs):
    """`manycpu run`, on the cluster."""


class Pushes(RunsThere):
    """`manycpu run` with a registry, which has only the base of the image."""

    concerns = "registry "
    registry = ""
    """Its host and port."""
    _trial = 0

    def found(self) -> dict[str, object]:
        found = super().found()
        state, left, _ = cast("list[object]", found["report"])  # the image is in another repository each time
        return found | {"report": [state, left]}

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
        return (*super().words, *self.where)


class CancelsThere(OnCluster, Cancels):
    """`manycpu cancel`, on the cluster."""

    @property
    def words(self) -> Sequence[str]:
        return (*super().words, *self.where)

    def found(self) -> dict[str, object]:
        (ledger,) = [
            one for one in self.at.cluster.objects["ConfigMap"] if one["metadata"]["name"] == self.named
        ]
        kept = [path.read_text() for path in self.volume.glob(f"**/{self.named}/**/checkpoint")]
        return {"kept": kept, "ends": ledger["data"].get("cancelled.1"), **OnCluster.found(self)}


def points(seen: Sequence[str], few: int | None, *, crashes: bool) -> list[tuple[str, str]]:
    """Choose where there are trials: the fault, and the request.

    Args:
        seen: The requests that the command sends without a fault, in their order.
        few: About how many trials; None: one for each fault at each request that it fits.
        crashes: Whether the faults are crashes of the command, or else errors.
    """
    once = [one for one in seen if "selfsubject" not in one or one.endswith("#1")]
    every = [
        (fault, request)
        for request in once
        for fault in ((CRASHES if is_change(request) else ()) if crashes else faults_of(request))
    ]
    stride = max(1, len(every) // few) if few else 1
    return every[stride // 2 :: stride]


class Trial(NamedTuple):
    """A trial that ended: how the command ended that met the fault, and what is wrong."""

    code: int
    struck: bool
    breaches: list[str]


def usual(scene: OnCluster, server: Server) -> tuple[list[str], Found]:
    """Run a scene's command without a fault; return its requests, and what is found after it."""
    scene.reset()
    scene.prepare(server)
    scene.at.requests.plan()
    ended = server.type(scene, scene.words)
    assert ended.code == 0, ended.said
    return [one for one in scene.at.requests.seen if one.startswith(scene.concerns)], scene.found()


def trial(scene: OnCluster, server: Server, fault: str, request: str, expected: Found) -> Trial:
    """Run a scene's command with a fault at a request, then again if it did not end well; judge both."""
    scene.reset()
    scene.prepare(server)
    scene.at.requests.plan(fault, request)
    first = server.type(scene, scene.words)
    again = first if first.code == 0 else scene.repeat(server)
    return Trial(first.code, scene.at.requests.struck, breaches(first, again, scene.found(), expected))


def tried(scene: OnCluster, server: Server, few: int, *, crashes: bool) -> list[str]:
    """Try a scene's command with faults at its requests; return the breaches."""
    seen, expected = usual(scene, server)
    chosen = [_REPLAYED] if _REPLAYED[1] else points(seen, None if ALL else few, crashes=crashes)
    failed, struck = list[str](), 0
    for fault, request in chosen:
        done = trial(scene, server, fault, request, expected)
        wrong = "; ".join(done.breaches)
        verdict = wrong or (f"well ({done.code})" if done.struck else "it did not come to it")
        print(f"{fault} at {request}: {verdict}", flush=True)  # noqa: T201
        struck += done.struck
        failed += [f"{fault} at {request}: {wrong}"] if wrong else []
    scene.reset()
    print(f"{len(seen)} requests, {len(chosen)} trials, {struck} struck, {len(failed)} breaches")  # noqa: T201
    return failed


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": url}}],
        "users": [{"name": "x", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
