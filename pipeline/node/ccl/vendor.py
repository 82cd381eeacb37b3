"""Intel's own binding, for torch 2.8 and earlier: which version fits which torch, and how it is used.

>>> matching_version("1.12.0"), matching_version("1.12.1+cpu"), matching_version("2.8.0")
('1.12.0', '1.12.100', '2.8.0')
>>> fits("2.8.0", "2.8.0+cpu"), fits("2.8.1", "2.8.0"), fits("1.12.1", "1.12.100")
(True, False, True)
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from manycpu.pipeline.node.backends import UnavailableError

_LAST_TORCH: Final = (2, 8)
_PACKAGES: Final = (  # name of the package, name of its module
    ("oneccl-bind-pt", "oneccl_bindings_for_pytorch"),
    ("oneccl_bindings_for_pytorch", "oneccl_bindings_for_pytorch"),
    ("torch-ccl", "torch_ccl"),
)
_RENUMBERED: Final = {"1.12.1": "1.12.100"}


class Binding(NamedTuple):
    """A binding that is installed."""

    package: str
    module: str
    version: str


def _release(version: str) -> str:
    """Return the release in a version: ``2.8.0`` of ``2.8.0+cpu``."""
    return re.split(r"[+a-z]", version, maxsplit=1)[0].rstrip(".")


def matching_version(torch_version: str) -> str:
    """Return the version of the binding that was made for a torch."""
    release = _release(torch_version)
    return _RENUMBERED.get(release, release)


def fits(torch_version: str, binding_version: str) -> bool:
    """Whether a binding was made for this torch: versions are equal, but torch 1.12.1 needs 1.12.100."""
    return _release(binding_version) == matching_version(torch_version)


def is_served(torch_version: str) -> bool:
    """Whether a binding was released for this torch."""
    major, minor = (int(part) for part in _release(torch_version).split(".")[:2])
    return (major, minor) <= _LAST_TORCH


def find(torch_version: str) -> Binding | None:
    """Find the installed binding of Intel to use; None: use manycpu's own backend.

    None means that no binding was released for this torch, or that none is installed.

    Raises:
        UnavailableError: The installed binding was made for another torch.
    """
    if not is_served(torch_version):
        return None
    for package, module in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return checked(torch_version, Binding(package, module, version))
    return None


def checked(torch_version: str, binding: Binding) -> Binding:
    """Return the binding if it fits; else raise UnavailableError with the version that does."""
    if fits(torch_version, binding.version):
        return binding
    raise UnavailableError(
        f"{binding.package} {binding.version} was not made for torch {torch_version}; install "
        f"{binding.package}=={matching_version(torch_version)}, or uninstall it to use manycpu's own"
    )


def use(binding: Binding) -> None:
    """Set the variables that the binding's environment script sets, and import the binding.

    Raises:
        UnavailableError: The binding's module is missing, or its script failed.
    """
    spec = importlib.util.find_spec(binding.module)
    if spec is None or spec.origin is None:
        raise UnavailableError(
            f"{binding.package} {binding.version} is installed and has no module {binding.module}"
        )
    script = Path(spec.origin).parent / "env" / "setvars.sh"
    if script.exists():
        # Run the script ("$0") in a shell, and read all variables that the shell then has, separated by NUL.
        command = ["sh", "-c", '. "$0" >/dev/null && env -0', str(script)]
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        if result.returncode:
            raise UnavailableError(f"{script} failed: {result.stderr.strip()[:500]}")
        pairs = (entry.partition("=") for entry in result.stdout.split("\0") if "=" in entry)
        os.environ.update({name: value for name, _, value in pairs})
    importlib.import_module(binding.module)
