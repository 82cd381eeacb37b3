"""The stages of a test session: fast stages run first, and a stage with failures is the last one.

If several processes share the tests (``pytest -n 3``), each gets whole files. One process always runs cluster
tests, which take longest, and one runs the tests with Airflow's own processes. The tests that end the cluster
run after all others.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

STAGES: Final[dict[str, tuple[str, ...]]] = {
    "lint": ("lint",),
    "unit": ("unit",),
    "contract, dags": ("contract", "dags"),
    "e2e, ui": ("e2e", "ui"),
    "cluster, kubernetes": ("cluster", "kubernetes"),
    "others": ("long", "legacy", "xla"),
}
"""Name of a stage -> its folders; the stages run in this order."""
_SECONDS: Final = ("lint", "unit")
_FAST: Final = "what takes seconds"
_CLUSTER: Final = "cluster, kubernetes"
_AIRFLOW: Final = "e2e, ui"
_WITH_AIRFLOW: Final = "tests/kubernetes/test_airflow.py"
"""Needs Airflow's own processes and the cluster."""
_END: Final = "the end of the cluster"
_AT_THE_END: Final = ("tests/kubernetes/test_whole_rights.py", "tests/cluster/test_life.py")
"""The test that checks what all other tests did to the cluster, and the tests that end the cluster."""
_REST: Final = "the rest"
_ON_THE_CLUSTER: Final = 2  # processes at a time: the runs of two fit on the cluster's nodes
_NEVER_ENDS: Final = 1200  # seconds; a test may take ten times as long on a slow machine
_DEAD: Final = pytest.StashKey[str]()


def stage_of(nodeid: str) -> str:
    """Return the stage of a test by its path below the project."""
    folder = Path(nodeid).parts[1]
    return next((stage for stage, folders in STAGES.items() if folder in folders), "others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last: the test judges what the others of its stage did")
    config.addinivalue_line("markers", "alone: the test has the cluster to itself: it causes a fault for all")
    config.addinivalue_line("markers", "long: the test is for `make test-long`: a shorter one is like it")
    config.addinivalue_line("markers", "ends_cluster: the test ends the cluster, so it runs after all others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    for item in items:
        if {"airflow", "cluster"} & set(_fixtures(item)):
            # func_only: fixtures do not count, because the first test starts the cluster or Airflow. The
            # timeout only ends a test that hangs; each wait in a test has its own limit.
            own = item.get_closest_marker("timeout")
            seconds = max(own.args[0] if own else 0, _NEVER_ENDS)
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Return the sort key of a test: by stage; within a stage, tests that need the cluster alone come first.

    Tests with Airflow come last in their own stage, and first in the next one, that of the cluster: so one
    Airflow serves both.
    """
    stage, airflow = stage_of(item.nodeid), "airflow" in _fixtures(item)
    last, alone = [_has(item, name) for name in ("ends_cluster", "last")], _has(item, "alone")
    turn = airflow if stage == _AIRFLOW else not airflow
    return list(STAGES).index(stage), *last, turn, not alone, "cluster" in _fixtures(item)


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


class Files(LoadScopeScheduling):
    """Scheduler that gives whole files to processes.

    One process always runs cluster tests, at most two do, and the tests that end the cluster come last.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return what a process gets as a whole: the test's file, or all files with Airflow's processes."""
        file = nodeid.split("::", maxsplit=1)[0]
        if file == _WITH_AIRFLOW or stage_of(nodeid) == _AIRFLOW:
            return _AIRFLOW
        return _END if file in _AT_THE_END else file

    def _reschedule(self, node: Any) -> None:
        for one in (node, *self.nodes):  # another process may wait for the end of a file
            super()._reschedule(one)

    def _assign_work_unit(self, node: Any) -> None:
        others = [one for one in self.nodes if one is not node and self._files_left(one)]
        if scope := self._next_file(others):
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)
        elif not all(one.shutting_down for one in others):  # the others run the remaining files
            node.shutdown()

    def _next_file(self, others: Sequence[Any]) -> str | None:
        """Return the next file for a process; None: it must wait until another one ends a file.

        ``others`` are the other processes that have files. If one of them runs cluster files, they come late.
        """
        at_cluster = sum(_CLUSTER in map(_kind, self._files_left(one)) for one in others)
        order = [_FAST, _CLUSTER, _AIRFLOW, _REST, _END]
        if at_cluster:
            order = [_FAST, _AIRFLOW, _REST, _CLUSTER, _END]
        closed = {_CLUSTER: at_cluster >= _ON_THE_CLUSTER, _END: bool(others)}
        files: dict[str, list[str]] = {}
        for scope in self.workqueue:
            files.setdefault(_kind(scope), []).append(scope)
        kind = next((kind for kind in order if kind in files and not closed.get(kind)), None)
        if kind is None:
            return None
        # A second process takes cluster files from the end: the first ones have tests that run alone.
        return files[kind][-1 if kind == _CLUSTER and at_cluster else 0]

    def _files_left(self, node: Any) -> list[str]:
        return [scope for scope, tests in self.assigned_work[node].items() if not all(tests.values())]


def _kind(scope: str) -> str:
    if scope in (_AIRFLOW, _END):
        return scope
    stage = stage_of(scope)
    return _FAST if stage in _SECONDS else stage if stage == _CLUSTER else _REST


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        node.config.stash[_DEAD] = f"{node.gateway.id}: {error}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session if one of its processes died: its remaining tests did not run."""
    if _DEAD in session.config.stash and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the session after the last test of a stage if any test has failed."""
    result = yield
    stage = stage_of(item.nodeid)
    if nextitem is not None and stage != stage_of(nextitem.nodeid) and item.session.testsfailed:
        item.session.shouldfail = f"stage {stage!r} had failures: the stages after it were not run"
    return result


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    """Print a test's name as soon as it fails: a session that is killed prints no summary."""
    if not isinstance(report, pytest.TestReport) or not report.failed:
        return None
    reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
    category = "failed" if report.when == "call" else "error"
    line = f"\n{category.upper()} {report.nodeid} after {report.duration:.0f} s: {reason[:400]}\n"
    return category, line, category.upper()


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
