"""Describe the packages that this Python has: sbom.py lock | image NAME | licences.

`lock` writes a CycloneDX SBOM of the Python packages, `image` one with Debian's packages too, and `licences`
what each Python package declares. This file needs nothing but Python, so that an image can describe itself:

    docker run --rm -i NAME python3 - image NAME <requirements/sbom.py
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions, version
from typing import Any
from urllib.parse import quote


def main(what: str, image: str = "") -> None:
    packages = sorted(_python_packages(), key=lambda package: package["purl"])
    if what == "licences":
        sys.stdout.writelines(f"{each['name']} {each['version']}: {_as_text(each)}\n" for each in packages)
        return
    if what == "image":
        described = {"type": "container", "name": image}
        packages += _debian_packages()
    else:
        described = {"type": "library", "name": "manycpu", "version": version("manycpu")}
    # It has neither the time nor a random number: the same packages give the same bytes.
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    json.dump(sbom | {"metadata": {"component": described}, "components": packages}, sys.stdout, indent=1)


def _python_packages() -> Iterator[dict[str, Any]]:
    seen = set()
    for package in distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        if name not in seen:  # else one that is earlier on the path hides it
            seen.add(name)
            yield _component(f"pypi/{name}", package.version) | {"licenses": _licences(package)}


def _licences(package: Distribution) -> list[dict[str, Any]]:
    """Return what a package declares: an SPDX expression, or the names that older metadata has."""
    fields = package.metadata.get_all
    for expression in fields("License-Expression") or []:
        return [{"expression": expression}]
    classifiers = (each for each in fields("Classifier") or [] if each.startswith("License :: "))
    names = [each.rpartition(" :: ")[2] for each in classifiers]
    names = names or [line for text in fields("License") or [] for line in text.splitlines()[:1]]
    return [{"license": {"name": name}} for name in names]


def _as_text(component: dict[str, Any]) -> str:
    licences = (each.get("expression") or each["license"]["name"] for each in component["licenses"])
    return ", ".join(licences) or "not declared"


def _debian_packages() -> list[dict[str, Any]]:
    system = platform.freedesktop_os_release()["ID"]
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\\n"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    packages = (line.split() for line in sorted(listed.splitlines()))
    return [_component(f"deb/{system}/{name}", release, f"?arch={cpu}") for name, release, cpu in packages]


def _component(path: str, release: str, suffix: str = "") -> dict[str, Any]:
    purl = f"pkg:{path}@{quote(release, safe='')}{suffix}"
    name = path.rpartition("/")[2]
    return {"type": "library", "bom-ref": purl, "name": name, "version": release, "purl": purl}


if __name__ == "__main__":
    main(*sys.argv[1:])
