"""A folder of runs that several users of a machine share."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manycpu.pipeline.adapters.lock import locked, signs
from manycpu.pipeline.adapters.ssh_copies import _NOTE

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder that all users may write to, with all of its parents."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is for its user alone
        for path in (Path(folder), Path(folder, "runs"), Path(folder, "code")):
            path.mkdir(exist_ok=True)
            path.chmod(0o1777)
        yield Path(folder)


@contextmanager
def another_user() -> Iterator[None]:
    """Have this process be somebody else, who may not pass over permissions."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_lock_that_another_user_made_is_held_by_whoever_may_read_it(shared: Path) -> None:
    path = shared / "code" / ".0123.lock"
    with locked(path):
        pass
    path.chmod(0o644)
    with another_user(), locked(path) as descriptor:
        signs(descriptor)()
        taken = subprocess.run(["flock", "-n", str(path), "true"], check=False)
        assert taken.returncode == 1
    assert subprocess.run(["flock", "-n", str(path), "true"], check=False).returncode == 0


def test_a_use_is_noted_on_a_host_where_another_user_delivered_the_same(shared: Path) -> None:
    folder = shared / "code" / "0123"
    folder.mkdir()
    for user, run in ((0, "first"), (NOBODY, "second")):
        names = {"FOLDER": str(folder), "RUN": str(shared / "runs" / run), "USE": "code/0123"}
        noted = subprocess.run(
            ["sh", "-c", f"umask 022\n{_NOTE}"],
            env={**os.environ, **names},
            user=user,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (noted.returncode, noted.stderr) == (0, "")
    assert noted.stdout.endswith(" first")
    assert (shared / "runs" / "second" / "uses" / "code" / "0123").is_dir()
