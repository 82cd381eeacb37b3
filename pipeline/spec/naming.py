"""Names and labels that only one run has."""

import hashlib
import re

from manycpu.pipeline.spec.kube_object import KubeObject

_KEY_LENGTH = 10
_NAME_LENGTH = 40  # leaves room for what operators append, within the 63 characters of a DNS label


def run_key(*identity: object) -> str:
    """Return a run's key: the first 10 hexadecimal digits of a hash of the values that identify it."""
    # Escape the separator \x1f within parts, so that different parts never give the same text.
    parts = (str(part).replace("\x1e", "\x1e0").replace("\x1f", "\x1e1") for part in identity)
    # Python reads bytes that are not UTF-8 as halves of surrogate pairs, which encode() refuses by default.
    text = "\x1f".join(parts).encode(errors="surrogatepass")
    return hashlib.sha256(text).hexdigest()[:_KEY_LENGTH]


def is_key(text: str) -> bool:
    """Whether a text may be the key of a run.

    >>> is_key("1a2b3c4d5e"), is_key("models")
    (True, False)
    """
    return re.fullmatch(rf"[0-9a-f]{{{_KEY_LENGTH}}}", text) is not None


def run_name(label: str, key: str) -> str:
    """Join a readable label and the run's key to a name that Kubernetes allows (DNS-1035, 40 characters)."""
    slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    # A DNS-1035 name begins with a letter. The 1 leaves room for a hyphen.
    slug = re.sub(r"^[^a-z]+", "", slug)[: _NAME_LENGTH - _KEY_LENGTH - 1].strip("-")
    return f"{slug or 'run'}-{key}"


def secret_name(name: str) -> str:
    """Return the name of the Secret that holds a run's secret variables, such as HF_TOKEN."""
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
    """Return the value of the label ``manycpu/<key>`` of an object; empty: it has no such label.

    >>> label({"metadata": {"labels": labels("qa-1a2b3c4d5e", role="rank")}}, "role")
    'rank'
    """
    return str(item["metadata"].get("labels", {}).get(f"manycpu/{key}", ""))


def attempt_key(item: KubeObject) -> tuple[str, str]:
    """Read the run and the attempt of a job or a pod from its labels."""
    return label(item, "run"), label(item, "attempt")
