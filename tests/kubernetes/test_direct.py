"""Data goes directly to helper pods over TLS if they can be reached, else through the API server."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.faults import Faults
from cluster.space import Space
from support.volume_shell import no_pod_is_left, pods, quiet, shell, sums, sums_here

from manycpu.pipeline.targets.kubernetes import stage
from manycpu.pipeline.targets.kubernetes.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import helper

pytestmark = pytest.mark.pod_security("restricted")
Open = Callable[..., ClusterContext]
LARGE = 768 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(os.urandom(3 << 20))
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(LARGE)
    return folder


def ways(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the ways that data took to helper pods, from the log."""
    return [line.partition(" goes ")[2] for line in caplog.messages if line.startswith("data for pod")]


def test_data_goes_straight_to_the_pod_and_the_log_says_so_once(
    a_context: Open, source: Path, namespace: Space, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ctx = a_context()
    found = stage.stage(ctx, {"data": str(source), "model": str(source)}, quiet)
    assert ways(caplog) == ["straight to it, over TLS"]
    with shell(ctx, namespace) as run:
        assert sums(run, found["data"].path) == sums_here(source)
    no_pod_is_left(ctx)


def test_it_goes_on_after_a_break_in_a_large_file(
    a_context: Open, large: Path, namespace: Space, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ctx, done = a_context(), list[int]()

    def breaking(there: int, total: int) -> None:
        if there < total and not done:
            faults.kill_container(namespace, *pods(ctx))
        done.append(there)

    found = stage.stage(ctx, {"data": str(large)}, breaking)
    assert done[0] < LARGE, "it was over before it could be broken"
    assert set(ways(caplog)) == {"straight to it, over TLS"}
    with shell(ctx, namespace) as run:
        assert sums(run, found["data"].path) == sums_here(large)


@pytest.mark.alone
@pytest.mark.usefixtures("cluster")
def test_pods_that_cannot_be_reached_are_spoken_to_through_the_api_server(
    a_context: Open, source: Path, namespace: Space, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ctx = a_context()
    with helper(ctx, "stage", claims.ensure_claim(ctx), quiet) as pod:
        pod.wait_ready()
        node = namespace.by_admin.pod(pod.name).spec.node_name
        with faults.pods_cut_off(node):
            found = stage.stage(ctx, {"data": str(source)}, quiet)
    (way,) = ways(caplog)
    assert way.startswith("through the API server, since 10.203.")
    assert way.endswith("cannot be reached: timed out")
    with shell(ctx, namespace) as run:
        assert sums(run, found["data"].path) == sums_here(source)


def test_a_target_that_forbids_it_never_tries(
    a_context: Open, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage.stage(a_context(direct=False), {"data": str(source)}, quiet)
    assert ways(caplog) == ["through the API server, since target.direct is false"]
