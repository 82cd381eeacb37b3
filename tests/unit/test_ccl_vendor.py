"""Which version of Intel's binding fits which torch; and how the one installed is used."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("torch")

from manycpu.pipeline.node.backends import UnavailableError
from manycpu.pipeline.node.ccl import vendor
from manycpu.pipeline.node.ccl.vendor import Binding


@pytest.mark.parametrize(
    ("torch_version", "binding", "fits"),
    [
        ("1.12.0", "1.12.0", True),
        ("1.12.0", "1.12.100", False),
        ("1.12.1", "1.12.100", True),
        ("1.12.1", "1.12.1", False),
        ("1.13.0+cpu", "1.13.0", True),
        ("2.1.0+cpu", "2.1.0+cpu", True),
        ("2.8.0", "2.8.0+cpu", True),
        ("2.8.0", "2.7.0", False),
        ("2.8.1", "2.8.0", False),
        ("2.10.0", "2.1.0", False),
    ],
)
def test_versions_that_fit(torch_version: str, binding: str, *, fits: bool) -> None:
    assert vendor.fits(torch_version, binding) is fits


@pytest.mark.parametrize(
    ("torch_version", "served"), [("1.12.1", True), ("2.8.0+cpu", True), ("2.9.0", False)]
)
def test_the_last_torch_it_was_made_for(torch_version: str, *, served: bool) -> None:
    assert vendor.is_served(torch_version) is served


def test_one_for_another_torch_is_refused_with_the_version_to_install() -> None:
    installed = Binding("oneccl-bind-pt", "oneccl_bindings_for_pytorch", "2.7.0")
    with pytest.raises(UnavailableError, match=r"install oneccl-bind-pt==2\.8\.0, or uninstall it"):
        vendor.checked("2.8.0", installed)


def _install(folder: Path, package: str, module: str, version: str) -> None:
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / module / "env").mkdir(parents=True)
    (folder / module / "__init__.py").write_text("import os\nROOT = os.environ['CCL_ROOT']\n")
    (folder / module / "env" / "setvars.sh").write_text("export CCL_ROOT=/from/the/script\n")


def test_the_one_installed_is_used_with_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "torch_ccl", "torch_ccl", "2.8.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CCL_ROOT", "before")
    monkeypatch.setattr("os.environ", dict(__import__("os").environ))
    binding = vendor.find("2.8.0+cpu")
    assert binding is not None
    vendor.use(binding)
    assert sys.modules.pop("torch_ccl").ROOT == "/from/the/script"


def test_where_none_is_installed_ours_is_used() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("torch-ccl")
    assert vendor.find("2.8.0") is None
    assert vendor.find("2.15.0") is None
