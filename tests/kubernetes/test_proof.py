"""A job that its operator calls successful, but that did not train as asked, is a failure."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline import train
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.listeners import ReadableLog
from manycpu.pipeline.spec.errors import TrainingFailedError
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes.context import cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.launch import place
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.stage import stage
from manycpu.pipeline.verbs.wait import wait

Fields = dict[str, Any]
pytestmark = pytest.mark.pod_security("restricted")


def mpirun(job: KubeObject) -> list[str]:
    """Return the mpirun command of an MPIJob's launcher."""
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    words: list[str] = launcher["command"]
    return words


def both_on_the_first_worker(job: KubeObject) -> None:
    meta, words = job["metadata"], mpirun(job)
    start = words.index("-f")
    worker = f"{meta['name']}-worker-0.{meta['name']}.{meta['namespace']}.svc"
    words[start : start + 4] = ["-hosts", worker, "-ppn", "2"]


def one_rank_alone(job: KubeObject) -> None:
    words = mpirun(job)
    words[words.index("-n") + 1] = "1"


def on_one_machine(job: KubeObject) -> None:
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    worker["affinity"] = {"podAffinity": worker["affinity"]["podAntiAffinity"]}


CHANGES: dict[str, tuple[Callable[[KubeObject], None], Fields, str]] = {
    "one pod": (both_on_the_first_worker, {"spread": "prefer"}, r"2 nodes were asked for, and all ranks ran"),
    "one rank": (one_rank_alone, {}, r"exit code 87.* 2 nodes .* were asked for, .* a world of 1"),
    "one machine": (on_one_machine, {}, r"exit code 87.* alone, where run.spread requires 2 machines"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_mpijob_that_ran_elsewhere_than_asked_is_a_failure(
    name: str, target: Fields, a_run: Callable[..., Fields], tmp_path: Path
) -> None:
    change, how, told = CHANGES[name]
    ctx = open_context(a_run(**how), target | {"launch": "mpijob"}, "proof", base=tmp_path)
    assert is_on_kubernetes(ctx)
    prepare(ctx)
    staged, built = stage(ctx), build(ctx)
    with ctx.ledger.update() as entry:
        entry.attempt = 1
    [job] = JOB_LAUNCHERS["mpijob"].objects(ctx.run, ctx.target, place(ctx, staged, built, entry))
    change(job)
    cluster_of(ctx).create(job)
    handle, attached = launch(ctx, staged, built)
    assert attached
    lines: list[str] = []
    seen = wait(ctx, handle, ReadableLog(lines.append))
    assert seen.state is RunState.FAILED, lines
    assert re.search(f"(?s){told}", f"{seen.reason}\n{seen.failure}"), seen
    report = cleanup(ctx)
    assert report is not None
    assert (report.state, report.left_behind) == ("failed", [])


def test_ranks_that_never_met_are_a_failure(target: Fields, a_run: Callable[..., Fields]) -> None:
    with pytest.raises(TrainingFailedError, match=r"(?s)exit code 86.*each of them trained alone"):
        train(a_run("print('each for itself')"), target, run_id="alone")
