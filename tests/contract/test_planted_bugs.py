"""Campaigns of faults find bugs that are planted into a copy of the product: their judge is not blind.

`make faults` hunts all of them, with trials by seed; `make test` only some that the first trials find.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import cluster_scenes, fault_scenes
from support.fault_scenes import Scene, Server
from support.fault_trials import ALL, REPLAYED, hunted
from support.planted_bugs import FOLDER, HERE, PRODUCT, THERE, bugs, library_digest, plant, scene_of

pytestmark = pytest.mark.timeout(36_000 if ALL else 900)
BUDGET = 60
"""Trials within which a bug must be found."""
FEW = ["cleans_similar_names", "never_asks_again"]


@pytest.fixture
def scenes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def servers(bug: str, folder: Path, product: Path, stack: ExitStack) -> tuple[Scene, tuple[Server, Server]]:
    """Start servers of the product with and without a bug; return the bug's scene too."""
    name = scene_of(bug)
    target = "machines" if name in HERE else "kubernetes"
    clean = stack.enter_context(fault_scenes.server(target))
    planted = stack.enter_context(fault_scenes.server(target, product))
    if name in HERE:
        return HERE[name](folder / "scene"), (clean, planted)
    at = stack.enter_context(cluster_scenes.place(clean))
    scene = THERE[name](folder / "scene", at)
    scene.have_image_of(library_digest(product))
    return scene, (clean, planted)


@pytest.mark.parametrize("bug", bugs())
def test_a_planted_bug_fits_the_product(bug: str) -> None:
    subprocess.run(["git", "apply", "--check", "-C1", str(FOLDER / f"{bug}.diff")], check=True, cwd=PRODUCT)


@pytest.mark.parametrize("bug", bugs() if ALL or REPLAYED[1] else FEW)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, scenes: ExitStack) -> None:
    product = plant(bug, tmp_path / "product")
    scene, both = servers(bug, tmp_path, product, scenes)
    assert hunted(scene, both, product, bug, BUDGET) != ""
