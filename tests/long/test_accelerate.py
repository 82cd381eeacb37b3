"""Accelerate's own scripts, as users launch programs, on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ccl_requirements

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
MISSING = ccl_requirements.missing()


@pytest.mark.parametrize("script", ["test_script", "test_ops", "test_sync"])
@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("ccl", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))]
)
def test_its_scripts_pass(backend: str, script: str, tmp_path: Path) -> None:
    node = ["manycpu.pipeline.node", "--nproc-per-node=2", "-m", f"accelerate.test_utils.scripts.{script}"]
    done = subprocess.run(
        [sys.executable, "-m", *node],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / ".dev"), "MANYCPU_BACKEND": backend},
    )
    # test_ops asks for a PartialState, which no variable tells that it is for CPUs: each rank is alone.
    assert done.returncode == (86 if script == "test_ops" else 0), done.stdout[-4000:] + done.stderr[-4000:]
    assert script == "test_ops" or "DistributedType.NO" not in done.stdout
    assert f'"observed": "{backend}"' in done.stdout
