"""What the ranks of a job are and need, read off what a launcher describes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from manycpu.pipeline.spec.kube_object import KubeObject

__all__ = ["Ranks", "rank_template"]


class Ranks(NamedTuple):
    """What the ranks of a job need."""

    nodes: int
    """Pods without which it cannot begin."""
    pod: KubeObject
    """The spec of each."""


def rank_template(objects: Iterable[KubeObject]) -> KubeObject:
    """Find the template of a rank's pod among what a launcher describes, by its label."""
    return next(template for template in _inside(objects) if _is_rank(template))


def _inside(node: Any) -> Iterator[Any]:
    yield node
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ()
    for part in inner:
        yield from _inside(part)


def _is_rank(node: Any) -> bool:
    match node:
        case {"metadata": {"labels": {"manycpu/role": "rank"}}, "spec": _}:
            return True
    return False
