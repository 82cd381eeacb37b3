"""Bugs for campaigns of faults to find: each is a small diff that is applied to a copy of the product.

The first line of a diff names the scene whose trials must find the bug, the next ones say what is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from support import cluster_scenes as there
from support import fault_scenes as here
from support.cluster_scenes import Place

FOLDER: Final = Path(__file__).parents[1] / "faults" / "planted"
PRODUCT: Final = Path(__file__).parents[2]
HERE: Final[Mapping[str, Callable[[Path], here.Scene]]] = {
    "run": here.Runs,
    "run after a loss": here.RunsAfterLostModel,
    "resume": here.Resumes,
    "resume late": here.ResumesLate,
    "resume lost": here.ResumesLost,
    "run that fails": here.Fails,
    "run after a power loss": here.RunsAfterPowerLoss,
    "supervisor": here.RunsWithFaultsInSupervisor,
    "clean": here.Cleans,
    "cancel": here.Cancels,
}
"""Scenes on this machine."""
THERE: Final[Mapping[str, Callable[[Path, Place], there.OnCluster]]] = {
    "cluster run": there.RunsThere,
    "cluster run with a claim of its own": partial(there.RunsThere, claim=None),
    "cluster run after a loss": there.RunsAfterLostModelThere,
    "cluster resume": there.ResumesThere,
    "cluster resume late": there.ResumesLateThere,
    "cluster resume beside": there.ResumesBesideThere,
    "cluster run that fails": there.FailsThere,
    "cluster run later": there.RunsAfterClockJumpThere,
    "cluster clean": there.CleansThere,
    "cluster cancel": there.CancelsThere,
}
"""Scenes on the simulated cluster."""


def bugs() -> list[str]:
    """List the names of all planted bugs."""
    return sorted(path.stem for path in FOLDER.glob("*.diff"))


def scene_of(bug: str) -> str:
    """Return the name of the scene whose trials must find a bug."""
    first = (FOLDER / f"{bug}.diff").read_text().splitlines()[0]
    found = re.fullmatch(r"scene: (.+)", first)
    assert found, first
    return found[1]


def plant(bug: str, folder: Path) -> Path:
    """Copy the package ``pipeline``, and apply a bug's diff; return the folder to import manycpu from."""
    copied = folder / "manycpu"
    shutil.copytree(PRODUCT / "pipeline", copied / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-C1", str(FOLDER / f"{bug}.diff")], check=True, cwd=copied)
    return folder


def library_digest(product: Path) -> str:
    """Return the digest of the image layer with manycpu, as the product in a folder makes it."""
    program = "from manycpu.pipeline.targets.kubernetes.image.layers import library; print(library().digest)"
    env = os.environ | {"PYTHONPATH": str(product)}
    return subprocess.check_output([sys.executable, "-c", program], env=env, text=True)
