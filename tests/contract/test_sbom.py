"""What a release says of the packages that it needs, and of those that its images have."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def written(what: str, **environ: str) -> str:
    command = [sys.executable, "requirements/sbom.py", what]
    env = os.environ | environ
    return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout


def purls(sbom: str) -> set[str]:
    components: list[dict[str, Any]] = json.loads(sbom)["components"]
    found = {component["bom-ref"] for component in components}
    assert len(found) == len(components)
    return found


def test_the_sbom_has_every_pin_of_the_lock() -> None:
    sbom = written("lock", PYTHONHASHSEED="1")
    lines = (ROOT / "requirements/all.txt").read_text().splitlines()
    pins = [Requirement(line.rstrip(" \\")) for line in lines if "==" in line]
    needed = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert {f"pkg:pypi/{pin.name}@{str(pin.specifier)[2:]}" for pin in needed} <= purls(sbom)
    assert sbom == written("lock", PYTHONHASHSEED="2")


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this system has no packages of Debian")
def test_an_image_describes_itself_without_manycpu() -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    command = [python, "-I", "-", "image", "registry.example/train@sha256:1"]
    with (ROOT / "requirements/sbom.py").open() as script:
        sbom = subprocess.run(command, stdin=script, check=True, capture_output=True, text=True).stdout
    assert json.loads(sbom)["metadata"]["component"]["name"] == "registry.example/train@sha256:1"
    show = ["dpkg-query", "--show", "--showformat=${Version}?arch=${Architecture}", "dpkg"]
    dpkg = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    assert f"pkg:deb/{platform.freedesktop_os_release()['ID']}/dpkg@{dpkg}" in purls(sbom)
    assert not any(purl.startswith("pkg:pypi/manycpu@") for purl in purls(sbom))


def test_no_licence_of_the_bare_install_restricts_its_users() -> None:
    lines = dict(line.split(" ", 1) for line in written("licences").splitlines())
    needed = {Requirement(each).name for each in requires("manycpu") or () if "extra ==" not in each}
    assert len(needed) > 5
    unwanted = ("GPL", "Proprietary", "not declared")
    assert not {name: lines[name] for name in needed if any(word in lines[name] for word in unwanted)}
