"""The stages of a session: what takes seconds comes first, and a stage with failures is the last one."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

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
_TESTS: Final = Path(__file__).parents[1]
_SECONDS: Final = pytest.StashKey[dict[str, float]]()


def stage_of(path: Path) -> str:
    """Find the stage of a test by its file."""
    folder = path.relative_to(_TESTS).parts[0]
    return next(stage for stage, folders in STAGES.items() if folder in folders)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SECONDS] = {"collection": -time.monotonic()}
    config.addinivalue_line("markers", "last: the test judges what the others of its stage did")
    config.addinivalue_line("markers", "ends_cluster: the test ends the cluster, so it runs after all others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    for item in items:
        if {"airflow", "cluster"} & set(_fixtures(item)) and not item.get_closest_marker("timeout"):
            # Of the test alone: one of them pays for the start, whose steps have limits of their own.
            item.add_marker(pytest.mark.timeout(func_only=True))
    config.stash[_SECONDS]["collection"] += time.monotonic()


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Order by stage; in one, what needs Airflow, which ends then; what needs no cluster; and what does."""
    fixtures = _fixtures(item)
    stage = list(STAGES).index(stage_of(item.path))
    last = [item.get_closest_marker(name) is not None for name in ("ends_cluster", "last")]
    return stage, *last, "airflow" not in fixtures, "cluster" in fixtures


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Count the seconds of each stage, and end the session after one in which something failed."""
    started, stage = time.monotonic(), stage_of(item.path)
    result = yield
    seconds = item.config.stash[_SECONDS]
    seconds[stage] = seconds.get(stage, 0) + time.monotonic() - started
    if nextitem is not None and stage != stage_of(nextitem.path) and item.session.testsfailed:
        item.session.shouldfail = f"stage {stage!r} had failures: the stages after it were not run"
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = config.stash[_SECONDS]
    terminalreporter.section("seconds of each stage")
    told = ", ".join(f"{name}: {count:.0f}" for name, count in seconds.items())
    terminalreporter.line(f"{told}; all: {sum(seconds.values()):.0f}")
