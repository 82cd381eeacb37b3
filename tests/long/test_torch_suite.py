"""torch's own tests of its backends: what passes over gloo passes over ccl, or docs/ccl.md lists it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support import ccl_requirements

pytest.importorskip("expecttest")

MISSING = ccl_requirements.missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
LISTED = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "ccl.md").read_text()))
Results = Mapping[str, Mapping[str, str]]


def run(backend: str, name: str, *tests: str, ranks: int = 2) -> dict[str, dict[str, str]]:
    """Run the suite over a backend, which it takes for the one of that name; a result for each test."""
    with TemporaryDirectory() as folder:  # the suite leaves files behind
        return _run([backend, name, *tests], {"TMPDIR": folder, "WORLD_SIZE": str(ranks)})


def _run(args: list[str], env: dict[str, str]) -> dict[str, dict[str, str]]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("CCL_", "I_MPI", "MANYCPU_"))
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "scripts" / "torch_suite.py"), *args],
        check=False,
        capture_output=True,
        text=True,
        env=kept | env | {"PYTHONPATH": str(ROOT / ".dev")},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"test": ')]
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines, done.stderr[-3000:]
    return {line["test"]: line for line in lines}


def failed(results: Results) -> dict[str, str]:
    return {test: found["why"] for test, found in results.items() if found["result"] == "failed"}


@pytest.fixture(scope="module")
def passed_over_gloo() -> set[str]:
    return {test for test, found in run("gloo", "gloo").items() if found["result"] == "passed"}


# The suite skips much for a name that it does not know. For mpi it has what it skips for gloo: all_to_all,
# and groups of some of less than eight ranks.
@pytest.mark.parametrize(("name", "ranks"), [("gloo", 2), ("mpi", 3), ("ccl", 2)])
def test_what_passes_over_gloo_passes_over_ccl(name: str, ranks: int, passed_over_gloo: set[str]) -> None:
    results = run("ccl", name, ranks=ranks)
    if doubtful := failed(results):
        results |= run(
            "ccl", name, *doubtful
        )  # once more, as torch's own CI does: some count on quick machines
    assert {test: why for test, why in failed(results).items() if test not in LISTED} == {}
    passed = {test for test, found in results.items() if found["result"] == "passed"}
    assert not LISTED & passed, "docs/ccl.md lists what passes"
    if name == "gloo":
        assert not passed_over_gloo - passed - LISTED
