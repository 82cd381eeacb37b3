"""Run the tests that depend on Airflow with each version of it that manycpu supports: `make test-versions`.

Each version has an environment in the cache folder, with the packages of the day after its release. It is
made as users make theirs: manycpu's wheel is installed under constraints that were resolved without it. torch
and the like come from the project's environment, whose Python it shares: without torch, no run begins.
`make test-versions VERSIONS=3.1.8` tests some of the versions.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple


class Version(NamedTuple):
    """A version of Airflow, and the day after its release."""

    airflow: str
    day: str
    without: tuple[str, ...] = ()
    """Tests of what the version lacks."""


# The last release of each minor version.
VERSIONS: Final = (
    Version("3.1.8", "2026-03-12", without=("dags/test_demo.py",)),  # it logs no JSON
    Version("3.2.2", "2026-05-30"),
    Version("3.3.2", "2026-09-18"),
)
_PROJECT: Final = Path(__file__).parents[1]
_UV: Final = str(Path(sys.executable).with_name("uv"))
_PACKAGES: Final = ("pytest", "pytest-timeout", "pytest-xdist")
_TESTS: Final = (
    *("unit/test_access.py", "unit/test_champion.py", "unit/test_exec.py", "unit/test_function_source.py"),
    *("unit/test_plugin.py", "contract/test_cluster_calls.py", "contract/test_unlike_kind.py", "dags"),
    "e2e/test_standalone.py",
)


def main(chosen: list[str]) -> int:
    failed = []
    for version in VERSIONS:
        if not chosen or version.airflow in chosen:
            print(f"== Airflow {version.airflow}", flush=True)  # noqa: T201
            if _test(version):
                failed.append(version.airflow)
    print(f"failed with Airflow {', '.join(failed)}" if failed else "all passed")  # noqa: T201
    return bool(failed)


def _test(version: Version) -> int:
    """Run the tests with a version; returns the exit code of pytest."""
    arguments = [f"tests/{name}" for name in _TESTS]
    arguments += [f"--ignore=tests/{name}" for name in version.without]
    # Packages of that day may call what later ones deprecate: only `make test` makes warnings errors.
    python = str(_environment(version) / "bin" / "python")
    command = [python, "-m", "pytest", "-o", "filterwarnings=default", *arguments]
    return subprocess.run(command, cwd=_PROJECT, check=False).returncode


def _environment(version: Version) -> Path:
    """Make the environment of a version unless it exists; returns its folder."""
    cache = Path(os.environ.get("MANYCPU_CACHE") or "~/.cache/manycpu").expanduser() / "versions"
    content = repr((version, _PACKAGES, sys.prefix)) + (_PROJECT / "pyproject.toml").read_text()
    folder = cache / f"{version.airflow}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if not (folder / ".installed").exists():
        for old in cache.glob(f"{version.airflow}-*"):
            shutil.rmtree(old)
        _uv("venv", "--python", sys.executable, str(folder))
        options = ("--python", str(folder), "--exclude-newer", version.day)
        airflow = f"apache-airflow[cncf.kubernetes]=={version.airflow}"
        constraints = str(folder / "constraints.txt")
        _uv("pip", "compile", *options, "--output-file", constraints, "-", stdin=airflow)
        install = ("pip", "install", *options, "--constraint", constraints)
        _uv(*install, ".[airflow,kubernetes]")
        _check_wheel(folder)
        _uv(*install, *_PACKAGES)
        (packages,) = folder.glob("lib/python*/site-packages")
        (project,) = Path(sys.prefix).glob("lib/python*/site-packages")
        (packages / "zz_torch.pth").write_text(f"{project}\n")  # last on the path
        (folder / ".installed").touch()
    _uv("pip", "install", "--python", str(folder), "--no-deps", "--editable", ".")
    return folder


def _check_wheel(folder: Path) -> None:
    """See that the command and the provider work, in an environment that has nothing but the wheel."""
    env = os.environ | {"AIRFLOW_HOME": str(folder / "airflow")}
    for command in (["manycpu", "--version"], ["airflow", "providers", "get", "manycpu", "--full"]):
        program = str(folder / "bin" / command[0])
        subprocess.run([program, *command[1:]], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)


def _uv(*arguments: str, stdin: str | None = None) -> None:
    subprocess.run([_UV, "--quiet", *arguments], cwd=_PROJECT, check=True, input=stdin, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
