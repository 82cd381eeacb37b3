"""What a training wrote stays on its claim until it is exported, or a person removes the run by name."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.space import Space
from support.handmade_jobs import open_namespace
from support.volume_shell import shell, sums

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import CancelledError, TrainingFailedError
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.output import REPORT
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets import driver_of
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.deletion import kinds
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.prepare import prepare

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
MakeRun = Callable[..., Fields]
SAVES = """
import os, sys, time, torch.distributed as dist
dist.init_process_group()
folder, rank = os.environ["MANYCPU_CHECKPOINTS"], dist.get_rank()
if int(os.environ["MANYCPU_ATTEMPT"]) > 1:
    assert sorted(os.listdir(folder)) == ["of-0", "of-1"], os.listdir(folder)
    open(os.environ["MANYCPU_OUTPUT"] + f"/model-{rank}", "w").write("done")
    dist.barrier()
    sys.exit()
open(f"{folder}/of-{rank}", "w").write("a day of work")
dist.barrier()
print("saved", flush=True)
"""
FAILS, WAITS = SAVES + "sys.exit(3)", SAVES + "time.sleep(600)"


class Interrupts(Silent):
    """Listener that simulates Ctrl-C when the checkpoints exist."""

    def line(self, line: Any) -> None:
        if line.text == "saved":
            raise KeyboardInterrupt


def left(namespace: Space, name: str) -> set[str]:
    cluster = open_namespace(namespace)
    return {item["kind"] for kind in kinds() for item in cluster.list(kind, labels(name))}


def report(tmp_path: Path) -> Report:
    return Report.model_validate_json((tmp_path / "out" / REPORT).read_text())


def the_run(target: Fields) -> ClusterContext:
    (ctx,) = driver_of("kubernetes").runs(
        Kubernetes(namespace=target["namespace"], connection=target["connection"])
    )
    assert is_on_kubernetes(ctx)
    return ctx


@pytest.mark.parametrize("claim", ["its own", pytest.param("one that was there", marks=pytest.mark.long)])
def test_of_a_run_that_failed_output_and_checkpoints_stay_alone_and_the_same_run_continues(
    claim: str,
    target: Fields,
    a_run: MakeRun,
    a_context: Callable[..., ClusterContext],
    namespace: Space,
    tmp_path: Path,
) -> None:
    where = target | ({} if claim == "its own" else {"claim": claims.ensure_claim(a_context("maker"))})
    run = a_run(FAILS)
    with pytest.raises(TrainingFailedError) as caught:
        train(run, where, run_id="kept")
    written = report(tmp_path)
    (place,) = [place for place in written.kept if f"/runs/{written.name}/" in place]
    assert place.split()[0].endswith("/checkpoints")
    assert f"`manycpu clean {written.name} --delete-model" in caught.value.__notes__[0]
    assert left(namespace, written.name) == {"ConfigMap"} | (
        {"PersistentVolumeClaim"} if claim == "its own" else set()
    )
    again = train(run, where, run_id="kept")
    assert (again.state, again.attempts, again.left_behind) == ("succeeded", 2, [])
    assert {path.name for path in (tmp_path / "out").glob("model-*")} == {"model-0", "model-1"}
    assert left(namespace, written.name) == set()


def test_a_run_that_a_person_interrupts_keeps_its_checkpoints_until_the_next_run_finds_its_time_over(
    target: Fields,
    a_run: MakeRun,
    namespace: Space,
    a_context: Callable[..., ClusterContext],
    tmp_path: Path,
) -> None:
    with pytest.raises(CancelledError):
        train(a_run(WAITS), target, run_id="kept", listener=Interrupts())
    kept = the_run(target)
    lease = kept.ledger.lease()
    assert lease.until is not None
    assert abs(lease.until - kept.ledger.now() - kept.run.keep_for) < 3600
    assert left(namespace, kept.name) == {"ConfigMap", "PersistentVolumeClaim"}
    other = a_context("other", run=a_run(WAITS, output=str(tmp_path / "other")))
    prepare(other)
    assert kept.ledger.exists()
    with shell(kept, namespace) as run:
        found = sums(run, f"{kept.target.home}/runs/{kept.name}")
    assert set(found) == {"checkpoints/of-0", "checkpoints/of-1"}
    kept.ledger.change_lease(until=time.time() - 1)
    prepare(other)
    wait_for("what was kept to be gone", lambda: not left(namespace, kept.name), seconds=60)
    cleanup(other, delete_model=True)


def test_what_a_lost_job_wrote_stays_for_ever_whatever_keep_says(
    target: Fields, a_run: MakeRun, namespace: Space, tmp_path: Path
) -> None:
    class Deletes(Silent):
        def line(self, line: Any) -> None:
            if line.text == "saved":
                (job,) = open_namespace(namespace).list("PyTorchJob")
                open_namespace(namespace).delete("PyTorchJob", job["metadata"]["name"])

    with pytest.raises(TrainingFailedError):
        train(a_run(WAITS, keep="never"), target, run_id="kept", listener=Deletes())
    kept = the_run(target)
    assert kept.ledger.lease().until is None
    assert report(tmp_path).kept
    assert cleanup(kept, keep=False) is not None
    assert left(namespace, kept.name) == {"ConfigMap", "PersistentVolumeClaim"}
    cleaned = cleanup(kept, delete_model=True)
    assert cleaned is not None
    assert (cleaned.left_behind, left(namespace, kept.name)) == ([], set())
