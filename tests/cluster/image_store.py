"""The images of the nodes: unpacked once into the cache, and linked into every node of every cluster.

So each node's containerd starts with all images, without a download and without more disk space. Links are
enough because containerd never changes unpacked layers and downloaded blobs. Its databases are copied.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster import debian, node
from cluster.command import log
from cluster.namespace import Namespace, node_holder
from cluster.settings import Node, cache

UNPACKER = Node("unpacker", 0)
PULL_SECONDS = 900
# containerd's folder of unpacked layers.
SNAPSHOTS = "snapshots"


def _folder() -> Path:
    return cache() / "unpacked"


def _current() -> Path:
    return _folder() / "current"


def _mark(references: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([debian.release(), *references]).encode()).hexdigest()


def there(references: Sequence[str]) -> bool:
    """Return whether exactly these images are unpacked."""
    mark = _current() / "mark"
    return mark.exists() and mark.read_text() == _mark(references)


def ensure(namespace: Namespace, references: Sequence[str]) -> None:
    """Unpack these images with a temporary containerd, unless they are unpacked already."""
    if there(references):
        return
    log.info("unpacking %d images for the nodes", len(references))
    shutil.rmtree(_folder(), ignore_errors=True)
    part = _folder() / "part"
    part.mkdir(parents=True)
    node.configure_containerd(UNPACKER, part)
    node.mounts(namespace, UNPACKER)
    node.start_containerd(namespace, UNPACKER)
    for reference in references:
        node.ctr(namespace, UNPACKER, "images", "pull", "--plain-http", reference, seconds=PULL_SECONDS)
    namespace.stop(f"{UNPACKER.name}-containerd")
    namespace.stop(node_holder(UNPACKER.name))
    (part / "mark").write_text(_mark(references))
    part.rename(_current())


def link(root: Path) -> None:
    """Create containerd's folder `root` of a node, with the unpacked images in it."""
    shutil.copytree(_current(), root, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(SNAPSHOTS))
    for snapshots in _current().glob(f"*/{SNAPSHOTS}"):
        own = root / snapshots.relative_to(_current())
        own.mkdir()
        for layer in snapshots.iterdir():
            (own / layer.name).symlink_to(layer)


def _link_or_copy(source: str, target: str) -> None:
    if source.endswith(".db"):
        shutil.copy2(source, target)
    else:
        Path(target).hardlink_to(source)
