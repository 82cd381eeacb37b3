"""The components that are built from Go modules, and their versions: modules/COMPONENT/MINOR/.

To add a version, add a folder with its go.mod and go.sum. To add a component, see docs/test-cluster.md. The
newest version of each is the default. A variable such as MANYCPU_TEST_KUBERNETES=1.34 chooses another.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.command import ClusterError
from cluster.settings import HERE, cache

MODULES = HERE / "modules"


@dataclass(frozen=True)
class Module:
    """One version of one component."""

    component: str
    minor: str

    @property
    def folder(self) -> Path:
        return MODULES / self.component / self.minor

    @property
    def mod(self) -> str:
        return (self.folder / "go.mod").read_text()

    @property
    def packages(self) -> list[str]:
        """The packages for `go install`: the folder's main.go if it has one, else the tools of go.mod."""
        return ["."] if (self.folder / "main.go").exists() else ["tool"]

    def version(self, path: str) -> str:
        """Return the version of the dependency `path`, such as v1.35.4."""
        found = re.search(rf"^(?:require)?\s*{re.escape(path)} (v\S+)", self.mod, re.MULTILINE)
        if not found:
            raise ClusterError(f"{self.folder}/go.mod requires no {path}")
        return found[1]

    @property
    def go_version(self) -> str:
        """The oldest version of Go that can build the module."""
        return next(line.split()[1] for line in self.mod.splitlines() if line.startswith("go "))

    def digest(self) -> str:
        """Return a hash of everything that the built programs depend on."""
        content = hashlib.sha256()
        for file in sorted(self.folder.iterdir()):
            content.update(file.name.encode() + b"\0" + file.read_bytes())
        return content.hexdigest()[:12]

    @property
    def built(self) -> Path:
        """The folder of the built programs."""
        return cache() / "programs" / f"{self.component}-{self.minor}-{self.digest()}"

    def program(self, name: str) -> Path:
        return self.built / "bin" / name


def minors(component: str) -> list[str]:
    """Return the versions of a component in modules/, oldest first."""
    return sorted(
        (f.name for f in (MODULES / component).iterdir()), key=lambda v: [int(p) for p in v.split(".")]
    )


def variable(component: str) -> str:
    return f"MANYCPU_TEST_{component.upper().replace('-', '_')}"


def choose(component: str, env: Mapping[str, str] | None = None) -> Module:
    """Return a component at the version that its variable names, or else the newest; None: os.environ."""
    there = minors(component)
    asked = (os.environ if env is None else env).get(variable(component)) or there[-1]
    if asked not in there:
        raise ClusterError(f"{variable(component)}={asked}: there are {', '.join(there)} of {component}")
    return Module(component, asked)


def chosen(env: Mapping[str, str] | None = None) -> dict[str, Module]:
    """Return every component at its chosen version."""
    return {folder.name: choose(folder.name, env) for folder in sorted(MODULES.iterdir())}
