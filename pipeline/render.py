"""Kubernetes objects as YAML, to be read by people and taken by ``kubectl create -f``."""

from typing import Any

import yaml

__all__ = ["as_yaml"]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - every part is written out where it stands
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Small files are shown line by line.
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(*manifests: Any) -> str:
    """Write objects as YAML, each a document of its own."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=110)
