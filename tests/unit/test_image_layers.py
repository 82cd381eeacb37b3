"""The same files are the same layer, with any owner and any time."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.launchers.pod_spec import UID
from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.spec.image import sha256
from manycpu.pipeline.spec.placement import CODE, LIB
from manycpu.pipeline.targets.kubernetes.image import layers
from manycpu.pipeline.targets.kubernetes.image.layers import Tree, tag_of


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a program's folder."""
    (tmp_path / "part").mkdir()
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "part" / "b.py").write_text("b = 1")
    (tmp_path / "run.sh").write_text("true")
    (tmp_path / "run.sh").chmod(0o700)
    return tmp_path


def pack(folder: Path, *names: str) -> Tree:
    """Pack some files of a folder."""
    return layers.code(Location.of(str(folder), "run.program").only(names))


def members(tree: Tree) -> list[tarfile.TarInfo]:
    """List what is in a layer."""
    with tarfile.open(fileobj=io.BytesIO(tree.tar)) as tar:
        return tar.getmembers()


def test_folders_come_before_what_is_in_them_and_the_program_may_write_to_its_own(tree: Path) -> None:
    found = members(pack(tree, "train.py", "run.sh", "part/b.py"))
    assert [(info.name, oct(info.mode)) for info in found] == [
        ("opt/manycpu", "0o755"),
        ("opt/manycpu/code", "0o755"),
        ("opt/manycpu/code/part", "0o755"),
        ("opt/manycpu/code/part/b.py", "0o644"),
        ("opt/manycpu/code/run.sh", "0o755"),
        ("opt/manycpu/code/train.py", "0o644"),
    ]
    assert [(info.uid, info.gid) for info in found] == [(0, 0), *[(UID, UID)] * 5]
    assert {info.mtime for info in found} == {0}


def test_a_program_that_is_in_the_image_has_a_folder_to_work_in_too() -> None:
    (folder,) = [info for info in members(layers.library()) if info.name == CODE.lstrip("/")]
    assert (folder.isdir(), folder.uid, folder.gid) == (True, UID, UID)


def test_an_empty_folder_is_one_in_the_image(tree: Path) -> None:
    (tree / "logs").mkdir()
    found = members(pack(tree, "logs/", "train.py"))
    assert [(info.name, info.isdir()) for info in found][2:] == [
        ("opt/manycpu/code/logs", True),
        ("opt/manycpu/code/train.py", False),
    ]


def test_order_times_and_groups_do_not_matter(tree: Path) -> None:
    before = pack(tree, "train.py", "part/b.py")
    os.utime(tree / "train.py", (1, 1))
    (tree / "train.py").chmod(0o664)
    after = pack(tree, "part/b.py", "train.py")
    assert after.digest == before.digest
    assert after.layer.content == before.layer.content


def test_content_names_and_the_right_to_execute_matter(tree: Path) -> None:
    digests = {pack(tree, "train.py").digest, pack(tree, "run.sh").digest}
    (tree / "train.py").chmod(0o700)
    digests.add(pack(tree, "train.py").digest)
    (tree / "train.py").write_text("print(1)")
    digests.add(pack(tree, "train.py").digest)
    assert len(digests) == 4


def test_a_layer_says_what_its_tar_is(tree: Path) -> None:
    made = pack(tree, "train.py")
    assert made.layer.diff_id == sha256(made.tar) == f"sha256:{made.digest}"
    assert made.layer.digest == sha256(made.layer.content)


def test_a_file_that_cannot_be_read_is_named(tree: Path) -> None:
    with pytest.raises(BuildError, match=r"run\.program: .*gone\.py"):
        pack(tree, "gone.py")


def test_this_manycpu_can_be_imported_from_its_layer(tmp_path: Path) -> None:
    tree = layers.library()
    assert not [info.name for info in members(tree) if info.name.endswith(".pyc")]
    with tarfile.open(fileobj=io.BytesIO(tree.tar)) as tar:
        tar.extractall(tmp_path, filter="data")
    code = "import manycpu.pipeline.node.__main__ as n, manycpu.pipeline.transfer as t"
    code += "; print(n.__file__, t.__file__)"
    env = {"PYTHONPATH": f"{tmp_path}{LIB}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    root = f"{tmp_path}{LIB}/manycpu/pipeline"
    assert all(file.startswith(root) for file in done.stdout.split())


def test_a_tag_tells_base_and_every_tree(tree: Path) -> None:
    one, two = pack(tree, "train.py"), pack(tree, "run.sh")
    base = "sha256:" + "ab" * 32
    assert tag_of(base, [one, two]) == f"{'ab' * 6}-{one.digest[:12]}-{two.digest[:12]}"
