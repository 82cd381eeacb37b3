"""The launcher of an MPIJob that was suspended: only the job's own is touched."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from manycpu.pipeline.targets.kubernetes.following.launcher_release import LauncherRelease


class Cluster:
    """Has one launcher, and keeps what is asked to be changed."""

    def __init__(self, owner: str) -> None:
        self.patches: list[tuple[str, str, Any]] = []
        self._launcher = {
            "metadata": {"name": "train-launcher", "ownerReferences": [{"uid": owner}]},
            "spec": {"suspend": True},
            "status": {"startTime": "2026-01-01T00:00:00Z"},
        }
        self.asked = 0

    def get(self, kind: str, name: str) -> Any:
        assert (kind, name) == ("Job", "train-launcher")
        self.asked += 1
        return self._launcher

    def patch(self, kind: str, name: str, change: Any) -> None:
        self.patches.append((kind, name, change))


@pytest.mark.parametrize(("owner", "changes"), [("ours", 1), ("another's", 0)])
def test_only_the_jobs_own_launcher_loses_its_start(owner: str, changes: int) -> None:
    cluster: Any = Cluster(owner)
    kind = SimpleNamespace(launcher="Launcher")
    snapshot: Any = SimpleNamespace(
        name="train", uid="ours", suspended=True, last_transition=1.0, job_kind=kind
    )

    async def look() -> None:
        release = LauncherRelease(snapshot, cluster)
        release.release_after_change(began=True)
        assert release._task is not None  # noqa: SLF001 - what it does ends with it
        await release._task  # noqa: SLF001

    asyncio.run(look())
    assert cluster.asked == 1
    assert cluster.patches == [("Job", "train-launcher/status", {"status": {"startTime": None}})] * changes
