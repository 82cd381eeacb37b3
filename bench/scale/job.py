"""One job of 512 pods on hollow nodes, from its submission to the end of its task, in a triggerer of its own.

The operator is the real one; its pods run nowhere, and their ranks' lines come from a server of the
benchmark's. The operator's own times are those at which a watch of the benchmark's saw them.
"""

import asyncio
import json
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.scale import _triggerer
from bench.scale._child import child, progress
from bench.scale._seen import Seen, watching

PODS, NODES = 512, 600
SECONDS = 900.0  # in which it must be done
WORDS = {
    "title": "A job of 512 pods",
    "meaning": "A job of hundreds of pods costs its follower seconds of processor time in all. The follower "
    "sees its end as soon as the operator reports it.",
    "figures": {
        "submit: manycpu": ("Submitting it: manycpu, with its record and a trial on the server", "s", ""),
        "submit: kubectl create": ("Submitting it: `kubectl create` of the same manifest", "s", ""),
        "submit: more": (
            "Submitting it takes so much longer than `kubectl create`",
            "s",
            "at most [limit: submit: more]",
        ),
        "operator: all pods run": ("The operator has made all pods, and they run, after", "s", ""),
        "last pod to met": (
            "From the start of the last pod until all ranks are known to have met",
            "s",
            "at most [limit: last pod to met]",
        ),
        "operator: pods to succeeded": (
            "The operator calls the job a success so long after its last pod has ended",
            "s",
            "",
        ),
        "end to event": (
            "From the operator's word, and the last pod's end, to the end of the waiting task's wait",
            "s",
            "at most [limit: end to event]",
        ),
        "turn of the event loop: p99": (
            "A turn of the triggerer's event loop: 99 of 100 take less processor time than",
            "ms",
            "at most [limit: turn of the event loop: p99]",
        ),
        "turn of the event loop: longest": (
            "The longest turn, in which no other task is served",
            "ms",
            "at most [limit: turn of the event loop: longest]",
        ),
        "cpu": ("Processor time of the triggerer for all of it", "s", "at most [limit: cpu]"),
        "memory": ("Memory of the triggerer for it, at most", "MiB", "at most [limit: memory]"),
        "ledger": ("The run's ledger", "KiB", "at most [limit: ledger]"),
        "manifest": ("The job's manifest", "KiB", ""),
        "watched": ("Read from watches", "MiB", "at most [limit: watched]"),
        "ranks": ("Ranks that met", "", ""),
    },
}
LIMITS = {
    "submit: more": 1.0,
    "last pod to met": 10.0,
    "end to event": 5.0,
    "turn of the event loop: p99": 50.0,
    "turn of the event loop: longest": 500.0,
    "cpu": 60.0,
    "memory": 300.0,
    "ledger": 1024.0,
    "watched": 64.0,
}


def main() -> dict[str, Any]:
    """Measure."""
    from cluster import hollow
    from support.hollow_logs import Ranks, logs

    from bench._cluster import namespace

    progress(f"{NODES} hollow nodes")
    with (
        namespace("scale-job") as (cluster, space),
        TemporaryDirectory() as folder,
        logs(Ranks(PODS)) as ranks,
        hollow.nodes(cluster, NODES, ranks.kubelet) as nodes,
    ):
        return _measure(cluster, space, nodes, ranks, Path(folder))


def _measure(cluster: Any, space: Any, nodes: Any, ranks: Any, folder: Path) -> dict[str, Any]:
    from cluster.command import wait_for

    from bench._cluster import target
    from manycpu.pipeline.targets.kubernetes.volume import claims

    place = {"node_selector": nodes.place["nodeSelector"], "tolerations": nodes.place["tolerations"]}
    config = {"target": target(space, claim="scale", **place), "name": space.name, "folder": str(folder)}
    ctx, built = _context(config)
    space.create(claims.claim(ctx.name, ctx.target, []) | {"metadata": {"name": "scale"}})
    kubectl = _kubectl_create(cluster, space, ctx, built, folder)
    with watching(space) as seen, child("bench.scale.job", folder, config, SECONDS) as process:
        submitted = process.hear("submitted")
        progress(f"submitted in {submitted['seconds']:.2f} s; the operator makes its pods")
        _, met = process.hear("met"), time.time()
        progress(f"all have met {met - submitted['time']:.0f} s later; they end")
        ranks.end()
        pods = [f"{submitted['name']}-worker-{number}" for number in range(PODS)]
        nodes.end(space.name, pods[1:])
        nodes.end(space.name, pods[:1])
        end = process.hear("end")
        progress(f"{end['state']} {end['reason']}")
        if end["state"] != "succeeded":
            raise RuntimeError(end)
        done = process.hear("done")
        wait_for("the cluster's own word", lambda: len(seen.ended) == PODS and seen.succeeded, seconds=60)
    return {**_figures(kubectl, submitted, met, end["time"], seen), **done["figures"], "limit": LIMITS}


def _figures(kubectl: float, submitted: Any, met: float, event: float, seen: Seen) -> dict[str, Any]:
    last_end, succeeded = max(seen.ended.values()), seen.succeeded[submitted["name"]]
    return {
        "unit": "s, ms, MiB and KiB",
        "submit: manycpu": round(submitted["seconds"], 3),
        "submit: kubectl create": round(kubectl, 3),
        "submit: more": round(submitted["seconds"] - kubectl, 3),
        "operator: all pods run": round(max(seen.running.values()) - submitted["time"], 2),
        "last pod to met": round(met - max(seen.running.values()), 3),
        "operator: pods to succeeded": round(succeeded - last_end, 3),
        "end to event": round(event - max(succeeded, last_end), 3),
        "ranks": PODS,
    }


def _context(config: dict[str, Any]) -> tuple[Any, Any]:
    """Describe the run, with a program that the image is thought to have."""
    from manycpu.pipeline.spec.placement import CODE
    from manycpu.pipeline.targets.context import Built
    from manycpu.pipeline.targets.open_run import open_context

    run = {"program": "-m timeit", "output": f"{config['folder']}/out", "nnodes": PODS}
    run |= {"resources": {"cpu": 0.5, "memory": "100Mi"}, "start_timeout": 600}
    ctx = open_context(run, config["target"], config["name"], base=Path(config["folder"]))
    image = config["target"]["image"]
    return ctx, Built(code=CODE, program=("-m", "timeit"), digest="", image=image)


def _kubectl_create(cluster: Any, space: Any, ctx: Any, built: Any, folder: Path) -> float:
    """Create the same manifest with kubectl, suspended and under another name, and delete it."""
    from manycpu.pipeline.cli.spec_commands import as_yaml
    from manycpu.pipeline.launchers import JOB_LAUNCHERS
    from manycpu.pipeline.targets.context import Staged
    from manycpu.pipeline.targets.kubernetes import launch

    placement = launch.place(ctx, Staged(), built, entry=None)
    (job,) = JOB_LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement)
    job["metadata"]["name"] = "by-kubectl"
    job["spec"]["runPolicy"]["suspend"] = True
    (folder / "job.yaml").write_text(as_yaml(job))
    program = cluster.modules["kubernetes"].program("kubectl")
    command = [program, "--kubeconfig", space.kubeconfig, "--cache-dir", folder / "kubectl"]
    run = partial(subprocess.run, check=True, capture_output=True)
    run([*command, "get", "pods"])  # what kubectl looks up once is in its cache
    began = time.monotonic()
    run([*command, "create", "--filename", folder / "job.yaml"])
    seconds = time.monotonic() - began
    run([*command, "delete", "--filename", folder / "job.yaml"])
    return seconds


async def _follow(meter: _triggerer.Meter, config: dict[str, Any]) -> None:
    """Submit the job and follow it: this is the triggerer, and before that the worker."""
    from manycpu.pipeline.targets.context import Staged
    from manycpu.pipeline.targets.kubernetes import launch
    from manycpu.pipeline.targets.kubernetes.context import cluster_of

    ctx, built = _context(config)
    cluster = cluster_of(ctx)  # connected, as the worker is
    began = time.monotonic()
    ctx.ledger.open(ctx.new_entry(time.time()))
    handle, _ = launch.launch(ctx, Staged(), built)
    _triggerer.say("submitted", seconds=time.monotonic() - began, name=handle.name)
    before, cpu = _triggerer.memory()[0], _triggerer.cpu()
    triggerer = _triggerer.Triggerer([handle.model_dump(mode="json")])
    await _triggerer.until(lambda: meter.met() == PODS)
    _triggerer.say("met")
    await triggerer.join()
    turns = sorted(meter.turns)
    ledger = await asyncio.to_thread(cluster.get, "ConfigMap", ctx.name)
    job = await asyncio.to_thread(cluster.get, "PyTorchJob", handle.name)
    figures = {
        "turn of the event loop: p99": round(1e3 * statistics.quantiles(turns, n=100)[98], 2),
        "turn of the event loop: longest": round(1e3 * turns[-1], 1),
        "cpu": round(_triggerer.cpu() - cpu, 2),
        "memory": round(_triggerer.memory()[1] - before, 1),
        "ledger": round(len(json.dumps(ledger)) / 2**10, 1),
        "manifest": round(len(json.dumps(job["spec"])) / 2**10, 1) if job else 0.0,
        "watched": round(meter.watched / 2**20, 2),
    }
    _triggerer.say("done", figures=figures)


if __name__ == "__main__":
    _triggerer.main(_follow)
