"""The stages of a session: what takes seconds comes first, and a stage with failures is the last one.

Where several processes share the tests (``pytest -n 2``), one of them has the cluster, and another has
Airflow's own processes and then the rest, file by file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["STAGES", "stage_of"]

STAGES: Final[dict[str, tuple[str, ...]]] = {
    "lint": ("lint",),
    "unit": ("unit",),
    "contract, dags": ("contract", "dags"),
    "e2e, ui": ("e2e", "ui"),
    "cluster, kubernetes": ("cluster", "kubernetes"),
    "others": ("long", "legacy"),
}
"""Name of a stage -> its folders, in the order in which they run."""
_FAST: Final = ("lint", "unit")
_CLUSTER: Final = "cluster, kubernetes"
_AIRFLOW: Final = "e2e, ui"
_WITH_AIRFLOW: Final = "tests/kubernetes/test_airflow.py"
"""What needs both, and shares the cluster with the others."""
_DEAD: Final = pytest.StashKey[str]()


def stage_of(nodeid: str) -> str:
    """Find the stage of a test by its path below the project."""
    folder = Path(nodeid).parts[1]
    return next(stage for stage, folders in STAGES.items() if folder in folders)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last: the test judges what the others of its stage did")
    config.addinivalue_line("markers", "ends_cluster: the test ends the cluster, so it runs after all others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    for item in items:
        if {"airflow", "cluster"} & set(_fixtures(item)) and not item.get_closest_marker("timeout"):
            # Of the test alone: one of them pays for the start, whose steps have limits of their own.
            item.add_marker(pytest.mark.timeout(func_only=True))


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Order by stage; in one, what needs Airflow, which ends then; what needs no cluster; and what does."""
    fixtures = _fixtures(item)
    stage = list(STAGES).index(stage_of(item.nodeid))
    last = [item.get_closest_marker(name) is not None for name in ("ends_cluster", "last")]
    return stage, *last, "airflow" not in fixtures, "cluster" in fixtures


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


class Lanes(LoadScopeScheduling):
    """Gives whole files to processes: the fast ones, the cluster, Airflow, then the others."""

    def _split_scope(self, nodeid: str) -> str:
        file, stage = nodeid.split("::", maxsplit=1)[0], stage_of(nodeid)
        if file == _WITH_AIRFLOW or stage == _AIRFLOW:
            return _AIRFLOW
        return _CLUSTER if stage == _CLUSTER else file

    def _assign_work_unit(self, node: Any) -> None:
        if not any(stage_of(scope) in _FAST for scope in self.workqueue if "/" in scope):
            for lane in (_AIRFLOW, _CLUSTER):  # which takes longest comes first
                if lane in self.workqueue:
                    self.workqueue.move_to_end(lane, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        node.config.stash[_DEAD] = f"{node.gateway.id}: {error}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session of which a process died: what it was to run was not run."""
    if _DEAD in session.config.stash and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the session after a stage in which something failed."""
    result = yield
    stage = stage_of(item.nodeid)
    if nextitem is not None and stage != stage_of(nextitem.nodeid) and item.session.testsfailed:
        item.session.shouldfail = f"stage {stage!r} had failures: the stages after it were not run"
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [one for some in terminalreporter.stats.values() for one in some]
    if _DEAD in config.stash:
        terminalreporter.line(f"a process of the session died: {config.stash[_DEAD]}", red=True)
    seconds = dict.fromkeys(STAGES, 0.0)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[stage_of(report.nodeid)] += report.duration
    terminalreporter.section("seconds of each stage")
    terminalreporter.line(", ".join(f"{name}: {count:.0f}" for name, count in seconds.items() if count))
