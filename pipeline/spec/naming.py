"""Names and labels that only one run has."""

import hashlib
import re

from manycpu.pipeline.spec.kube_object import KubeObject

_KEY_LENGTH = 10
_NAME_LENGTH = 40  # leaves room for what operators append, within the 63 characters of a DNS label


def run_key(*identity: object) -> str:
    """Hash what identifies a run: 10 hexadecimal digits."""
    # Escaped, so that no part with a separator is taken for two.
    parts = (str(part).replace("\x1e", "\x1e0").replace("\x1f", "\x1e1") for part in identity)
    # A command line that is not UTF-8 has halves of surrogate pairs.
    text = "\x1f".join(parts).encode(errors="surrogatepass")
    return hashlib.sha256(text).hexdigest()[:_KEY_LENGTH]


def run_name(label: str, key: str) -> str:
    """Join a readable label and the key to a name that Kubernetes allows (DNS-1035, 40 characters)."""
    slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    slug = re.sub(r"^[^a-z]+", "", slug)[: _NAME_LENGTH - _KEY_LENGTH - 1].strip("-")
    return f"{slug or 'run'}-{key}"


def secret_name(name: str) -> str:
    """Name the Secret that has a run's variables which are named like a secret."""
    return f"{name}-env"


def key_of(name: str) -> str:
    """Return the key in a run's name.

    >>> key_of("my-qa-1a2b3c4d5e")
    '1a2b3c4d5e'
    """
    return name[-_KEY_LENGTH:]


def labels(name: str, **more: str) -> dict[str, str]:
    """Make the labels of everything that a run creates on Kubernetes.

    >>> labels("qa-1a2b3c4d5e", verb="stage")["manycpu/run"]
    'qa-1a2b3c4d5e'
    """
    common = {"app.kubernetes.io/managed-by": "manycpu", "manycpu/run": name}
    return common | {f"manycpu/{key}": value for key, value in more.items()}


def label(item: KubeObject, key: str) -> str:
    """Read a label ``manycpu/<key>`` of an object; empty: it has none.

    >>> label({"metadata": {"labels": labels("qa-1a2b3c4d5e", role="rank")}}, "role")
    'rank'
    """
    return str(item["metadata"].get("labels", {}).get(f"manycpu/{key}", ""))


def attempt_key(item: KubeObject) -> tuple[str, str]:
    """Read the run and the attempt of a job or a pod from its labels."""
    return label(item, "run"), label(item, "attempt")
