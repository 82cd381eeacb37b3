"""From a run's submission to the first line of its rank, beside `kubectl create` of the same manifest.

And from a change of the code to a running pod with it: as a layer upon the image, beside an image that a
builder pod makes with the code in it. Sides take turns; seconds.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.cluster import Cluster
from cluster.command import wait_for
from cluster.space import Space, beside
from support import builder_image

from bench._cluster import namespace, target
from bench._measure import by_turns, ratio, rounds, spread
from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.targets.context import Built, Staged
from manycpu.pipeline.targets.kubernetes import launch
from manycpu.pipeline.targets.kubernetes.build import build
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.deletion import wait_until_gone
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.open_run import open_context

CLAIM = "bench"
# The node part of manycpu is part of every image; this is the first that the user's own script does.
SCRIPT = "import time\nprint('first', time.time(), {number}, '{mark}', flush=True)\n"
DOCKERFILE = "FROM {base}\nCOPY train.py /opt/manycpu/code/train.py\n"
GONE = 60.0  # seconds
LOOK = 0.05  # seconds
STARTED = ("Running", "Succeeded")
WORDS = {
    "title": "Starting on Kubernetes",
    "meaning": "A run starts as fast as its bare manifest would, and changed code runs within seconds, "
    "since no image is built for it.",
    "figures": {
        r"submit to first line: (.+)": (r"\1: from the submission to the first line of the script", "s", ""),
        "more than kubectl create": (
            "manycpu takes so much longer than `kubectl create`",
            "s",
            "at most [target: more than kubectl create]",
        ),
        "code change to running pod: code layer": (
            "From changed code to a pod that runs it, by a layer put upon the image",
            "s",
            "at most [target: code layer]",
        ),
        "code change to running pod: image": (
            "From changed code to a pod that runs it, by an image that is built",
            "s",
            "",
        ),
        "image over code layer": ("The layer is so many times as fast as the image", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure."""
    with namespace("bench-launching") as (cluster, space), TemporaryDirectory() as folder:
        return _Bench(cluster, space, Path(folder)).measure()


class _Bench:
    def __init__(self, cluster: Cluster, space: Space, folder: Path) -> None:
        self._cluster, self._space, self._folder = cluster, space, folder
        self._builds = beside(space, "bench-builds", {})
        self._number = 0

    def measure(self) -> dict[str, Any]:
        first = self._context()
        self._space.create(claims.claim(first.name, first.target, []) | {"metadata": {"name": CLAIM}})
        built, _ = build(first)
        submit = by_turns(
            {"manycpu": partial(self._submit, built), "kubectl create": partial(self._create, built)},
            rounds(5, 1),
        ).times
        change = by_turns({"code layer": self._code_layer, "image": self._image}, rounds(3, 1)).times
        more = [
            ours - theirs for ours, theirs in zip(submit["manycpu"], submit["kubectl create"], strict=True)
        ]
        return {
            "unit": "s",
            "submit to first line": {name: spread(times) for name, times in submit.items()},
            "more than kubectl create": spread(more),
            "code change to running pod": {name: spread(times) for name, times in change.items()},
            "image over code layer": ratio(change["image"], change["code layer"]),
            "target": {"more than kubectl create": 1.0, "code layer": 5.0},
        }

    def _context(self, **more: Any) -> ClusterContext:
        self._number += 1
        program = self._folder / "code" / "train.py"
        program.parent.mkdir(exist_ok=True)
        program.write_text(SCRIPT.format(number=self._number, mark=self._space.name))
        target_fields = target(self._space, claim=CLAIM if self._number > 1 else None)
        run = {"program": str(program), "output": str(self._folder / "out"), "resources": {"cpu": 1.5}}
        ctx = open_context(run, target_fields | more, "bench", self._number, base=self._folder)
        assert is_on_kubernetes(ctx)  # noqa: S101 - for the type checker
        return ctx

    def _submit(self, built: Built) -> float:
        ctx = self._context()
        return self._first_line(ctx, time.time(), lambda: self._launch(ctx, built))

    def _launch(self, ctx: ClusterContext, built: Built | None = None) -> None:
        ctx.ledger.open(ctx.new_entry(time.time()))
        launch.launch(ctx, Staged(), built or build(ctx)[0])

    def _create(self, built: Built) -> float:
        ctx = self._context()
        placement = launch.place(ctx, Staged(), built, entry=None)
        manifest = self._folder / "job.yaml"
        manifest.write_text(
            as_yaml(*JOB_LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement))
        )
        program = self._cluster.modules["kubernetes"].program("kubectl")
        access = ["--kubeconfig", self._space.kubeconfig, "--cache-dir", self._folder / "kubectl"]
        command = [program, *access, "create", "--filename", manifest]
        return self._first_line(
            ctx, time.time(), partial(subprocess.run, command, check=True, capture_output=True)
        )

    def _code_layer(self) -> float:
        ctx, began = self._context(), time.time()
        return self._running(ctx, began, lambda: self._launch(ctx))

    def _image(self) -> float:
        (self._folder / "code" / "Dockerfile").write_text(
            DOCKERFILE.format(base=builder_image.with_history("torch"))
        )
        more = {
            "image": None,
            "dockerfile": str(self._folder / "code" / "Dockerfile"),
            "builder_image": builder_image.reference(),
            "build_namespace": self._builds.name,
        }
        ctx, began = self._context(**more), time.time()
        return self._running(ctx, began, lambda: self._launch(ctx))

    def _first_line(self, ctx: ClusterContext, began: float, submit: Callable[[], object]) -> float:
        """Return the seconds from the beginning to the first line of the rank's script."""
        with self._ended(ctx) as pods:
            submit()
            line = wait_for("the rank's first line", lambda: self._log_line(pods), seconds=180, every=LOOK)
        return float(line.split()[1]) - began

    def _running(self, ctx: ClusterContext, began: float, submit: Callable[[], object]) -> float:
        """Return the seconds from the beginning until the rank's pod runs."""
        with self._ended(ctx) as pods:
            submit()
            wait_for("the pod to run", lambda: self._phase(pods) in STARTED, seconds=180, every=LOOK)
            return time.time() - began

    @contextmanager
    def _ended(self, ctx: ClusterContext) -> Iterator[str]:
        """Delete what is submitted afterwards; yields the selector of the rank's pod."""
        pods = labels(ctx.name, role="rank")
        yield ",".join(f"{key}={value}" for key, value in pods.items())
        cluster_of(ctx).delete("PyTorchJob", f"{ctx.name}-1")
        leftover = wait_until_gone(ctx, pods, GONE)
        assert not leftover, leftover  # noqa: S101 - they would disturb the next

    def _phase(self, selector: str) -> str:
        return next((str(pod.status.phase) for pod in self._space.pods(selector)), "")

    def _log_line(self, selector: str) -> str:
        if self._phase(selector) not in STARTED:
            return ""
        lines = self._space.log(self._space.pods(selector)[0].metadata.name).splitlines()
        return next((line[line.index("first ") :] for line in lines if "first " in line), "")
