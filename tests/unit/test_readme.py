"""What the README shows is what the package takes."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from manycpu.pipeline.spec.validation import read_run, read_target

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_run_files_are_valid(text: str) -> None:
    fields: dict[str, Any] = yaml.safe_load(text)
    assert read_run(fields["run"]).output
    assert read_target(fields["target"]).kind in ("local", "baremetal")


def test_every_command_that_is_named_exists() -> None:
    from manycpu.pipeline.cli import cli

    named = set(re.findall(r"`(?:manycpu )?(run|preflight|plan|render|status|logs|cancel|clean)`", README))
    assert named <= set(cli.commands)
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make (\w+)", README)) - {"sure"}
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_link_and_picture_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_reference_of_fields_is_up_to_date() -> None:
    import runpy

    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    assert (ROOT / "docs" / "fields.md").read_text() == page, "run `make docs`"


def test_the_page_of_benchmarks_shows_the_results_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    page = importlib.import_module("bench._page").page()
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page, "run `python -m bench`"
    pictures = re.findall(r"\]\((images/[^)]+)\)", page)
    assert [name for name in pictures if not (ROOT / "docs" / name).exists()] == []
