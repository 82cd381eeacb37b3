"""The manifests of helper pods and claims are what a namespace with Pod Security ``restricted`` takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.golden import as_json, golden

from manycpu.pipeline.pod.channel import LostError
from manycpu.pipeline.spec.errors import DeadlineError, ForbiddenError
from manycpu.pipeline.targets.kubernetes import pod_status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod
from manycpu.pipeline.targets.kubernetes.volume.way_to_pod import WayToPod
from manycpu.pipeline.targets.open_run import open_context

OWNERS = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "qa-8a2b1c0d9e", "uid": "5f0c"}]


def context(**target: Any) -> ClusterContext:
    run = {
        "program": "question_answering",
        "output": "./out",
        "env": {"HF_ENDPOINT": "https://hub.example", "PYTHONPATH": "/mine"},
        "env_from": ["hub-token"],
        "job_name": "qa",
    }
    made = open_context(run, {"kind": "kubernetes", **target}, "golden", base=Path("/"))
    assert is_on_kubernetes(made)
    return made


def test_the_helper_pod_is_as_agreed() -> None:
    ctx = context(
        node_selector={"pool": "cpu"},
        tolerations=[{"key": "training", "operator": "Exists"}],
        pull_secret="registry",  # noqa: S106 - a secret's name
        pull_policy="IfNotPresent",
    )
    made = helper_pod.manifest(ctx, "stage", "training-data", "registry.example/helper@sha256:0", OWNERS)
    assert as_json(made) == golden("helper-pod.json", as_json(made))


def test_the_claim_is_as_agreed() -> None:
    ctx = context(claim_size="5Gi", storage_class="shared")
    text = as_json(claims.claim(ctx.name, ctx.target, OWNERS))
    assert text == golden("claim.json", text)


def test_a_claim_of_the_default_class_names_none() -> None:
    ctx = context()
    assert "storageClassName" not in claims.claim(ctx.name, ctx.target, OWNERS)["spec"]


def test_what_keeps_a_pod_from_running_is_said() -> None:
    waiting = {"reason": "InvalidImageName", "message": "couldn't parse image name"}
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T10:00:00Z"}
    pod = {
        "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "helper", "image": "a b"}]},
        "status": {
            "phase": "Pending",
            "conditions": [placed],
            "containerStatuses": [{"name": "helper", "state": {"waiting": waiting}}],
        },
    }
    (reason,) = pod_status.reasons(pod)
    assert reason.text.endswith("(InvalidImageName): couldn't parse image name")
    assert reason.fatal
    waiting |= {"reason": "CreateContainerConfigError", "message": 'secret "hub-token" not found'}
    assert [one.missing_secret for one in pod_status.reasons(pod)] == ["hub-token"]
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes",
    }
    pod["status"] = {"phase": "Pending", "conditions": [unscheduled]}
    (reason,) = pod_status.reasons(pod)
    assert (reason.text, reason.fatal) == ("no node: 0/2 nodes", False)


def test_a_pod_that_ran_out_of_memory_is_known_from_its_status() -> None:
    def pod(reason: str) -> dict[str, Any]:
        ended = {"exitCode": 137, "reason": reason, "startedAt": None, "finishedAt": None}
        return {
            "metadata": {"name": "x"},
            "spec": {"containers": [{"name": "helper"}]},
            "status": {
                "phase": "Failed",
                "containerStatuses": [{"name": "helper", "state": {"terminated": ended}}],
            },
        }

    assert helper_pod.out_of_memory(pod("OOMKilled"))
    assert not helper_pod.out_of_memory(pod("Error"))
    assert not helper_pod.out_of_memory({"metadata": {"name": "x"}, "spec": {}})


class Breaking(helper_pod.Helper):
    """A helper whose conversations break as told: seconds that pass, bytes that are done before."""

    def __init__(self, clock: list[float], breaks: list[tuple[float, int]]) -> None:
        self.name, self._progress = "x", lambda *_: None
        self._most_done, self._progressed, self._owned = 0, False, False
        self._clock, self._breaks = clock, breaks
        self._way = WayToPod(SimpleNamespace(), "x", direct=True)  # type: ignore[arg-type]

    def wait_ready(self) -> None:
        """Be ready at once."""

    def _talk(self, command: str, _: Any) -> Any:
        if not self._breaks:
            return command
        seconds, done = self._breaks.pop(0)
        self._clock[0] += seconds
        self.report(done, 10**12)
        raise LostError("gone")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stand in for time itself."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    return now


def test_a_models_progress_counts_after_that_of_a_larger_data_set(clock: list[float]) -> None:
    pod = Breaking(clock, [(3600, 100 << 30)])
    assert pod.run("data", None) == "data"  # type: ignore[arg-type]
    pod._breaks = [(400, 1 << 30), (400, 2 << 30), (400, 3 << 30)]  # noqa: SLF001
    assert pod.run("model", None) == "model"  # type: ignore[arg-type]


def test_the_first_break_is_no_stall_however_long_there_was_nothing_to_count(clock: list[float]) -> None:
    pod = Breaking(clock, [(3600, 0), (60, 0), (60, 0)])
    assert pod.run("data", None) == "data"  # type: ignore[arg-type]


def test_breaks_without_progress_have_an_end(clock: list[float]) -> None:
    pod = Breaking(clock, [(100, 1 << 20)] * 100)
    with pytest.raises(DeadlineError, match="300 s without progress: gone"):
        pod.run("data", None)  # type: ignore[arg-type]
    assert clock[0] < 1000


class Refused(Breaking):
    """A helper that is refused for so many seconds."""

    def _talk(self, command: str, _: Any) -> Any:
        if self._clock[0] < self._breaks[0][0]:
            raise ForbiddenError("no rights are known yet")
        return command


def test_an_api_server_that_knows_no_rights_yet_is_asked_again_for_seconds(clock: list[float]) -> None:
    assert Refused(clock, [(10, 0)]).run("data", None) == "data"  # type: ignore[arg-type]
    with pytest.raises(ForbiddenError):
        Refused(clock, [(100, 0)]).run("data", None)  # type: ignore[arg-type]
    assert clock[0] < 50
