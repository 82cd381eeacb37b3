"""Check the files that an open project has: workflows, forms, what they run."""

import re
import tomllib
from pathlib import Path
from typing import Any

import versions
import yaml

ROOT = Path(__file__).parents[2]
CI: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands() -> list[str]:
    """All commands of the workflow's steps."""
    return [step["run"] for job in CI["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_workflow_tests_each_python_that_the_package_supports() -> None:
    supported = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    low, high = (int(version.partition(".")[2]) for version in (supported[0], supported[-1]))
    assert PROJECT["requires-python"] == f">=3.{low},<3.{high + 1}"


def test_the_workflow_runs_make_targets_and_test_folders_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for command in commands() for target in re.findall(r"^make ([a-z-]+)", command)}
    assert targets == {"lint", "cluster", "cluster-down", "test-versions"}
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    paths = {path for command in commands() for path in re.findall(r"tests/[\w-]+", command)}
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_place_names_the_same_oldest_and_newest_airflow() -> None:
    oldest, newest = versions.VERSIONS[0], versions.VERSIONS[-1]
    assert f"apache-airflow>={oldest.airflow}" in PROJECT["optional-dependencies"]["airflow"]
    assert f"make test-versions VERSIONS={oldest.airflow}" in commands()
    assert f"needs Airflow {oldest.airflow} or later" in (ROOT / "docs" / "dag.md").read_text()
    assert f"apache-airflow=={newest.airflow} " in (ROOT / "requirements" / "all.txt").read_text()


def test_the_workflow_leaves_out_no_folder_of_make_test() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(pyproject["tool"]["pytest"]["ini_options"]["testpaths"])
    run = {path for command in commands() for path in re.findall(r"tests/[\w-]+", command)}
    assert folders - run == {"tests/lint"}  # what `make lint` runs


def test_the_workflow_may_read_and_nothing_else() -> None:
    assert CI["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in CI["jobs"].values())
    assert all("timeout-minutes" in job for job in CI["jobs"].values())


def test_dependency_updates_look_where_dependencies_are() -> None:
    config = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    for update in config["updates"]:
        for folder in update.get("directories", [update.get("directory")]):
            assert folder == "/" or list(ROOT.glob(folder.strip("/"))), folder


def test_the_changelog_begins_with_the_present_version_and_dates_what_was_released() -> None:
    versions = re.findall(
        r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d|unreleased)$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    number, dev, _ = PROJECT["version"].partition(".dev")
    assert versions[0][0] == number
    assert (versions[0][1] == "unreleased") is bool(dev)
    assert [date for _, date in versions[1:] if date == "unreleased"] == []
