"""Check the files that an open project has: workflows, forms, what they run."""

import re
import tomllib
from pathlib import Path
from typing import Any

import versions
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()
}
CI: dict[str, Any] = WORKFLOWS["ci"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(*workflows: str) -> list[str]:
    """All commands of the steps of workflows."""
    jobs = [job for name in workflows for job in WORKFLOWS[name]["jobs"].values()]
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_the_workflow_tests_each_python_that_the_package_supports() -> None:
    supported = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    low, high = (int(version.partition(".")[2]) for version in (supported[0], supported[-1]))
    assert PROJECT["requires-python"] == f">=3.{low},<3.{high + 1}"


def test_workflows_run_make_targets_and_files_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(commands(*WORKFLOWS))
    targets = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert targets == {"lint", "cluster", "cluster-down", "test-versions", "dist"}
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    paths = re.findall(r"(?:docker|requirements|tests)/[\w./-]+", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_place_names_the_same_oldest_and_newest_airflow() -> None:
    with_airflow = [version for version in versions.VERSIONS if version.airflow]
    oldest, newest = with_airflow[0], with_airflow[-1]
    assert f"apache-airflow>={oldest.airflow}" in PROJECT["optional-dependencies"]["airflow"]
    assert f"make test-versions VERSIONS={oldest.airflow}" in commands("ci")
    assert f"needs Airflow {oldest.airflow} or later" in (ROOT / "docs" / "dag.md").read_text()
    assert f"apache-airflow=={newest.airflow} " in (ROOT / "requirements" / "all.txt").read_text()


def test_the_page_on_versions_has_a_row_for_each_that_is_tested() -> None:
    rows = re.findall(r"^\| 3\.\d+ \|.*", versions.PAGE.read_text(), re.MULTILINE)
    begins = [versions.row_of(version) for version in versions.VERSIONS]
    assert [row[: len(begin)] for row, begin in zip(rows, begins, strict=True)] == begins


def test_the_workflow_leaves_out_no_folder_of_make_test() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(pyproject["tool"]["pytest"]["ini_options"]["testpaths"])
    run = {path for command in commands("ci") for path in re.findall(r"tests/[\w-]+", command)}
    assert folders - run == {"tests/lint"}  # what `make lint` runs


def test_workflows_may_read_and_only_a_release_may_publish() -> None:
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    jobs = {(name, job): spec for name in WORKFLOWS for job, spec in WORKFLOWS[name]["jobs"].items()}
    assert all("timeout-minutes" in job for job in jobs.values())
    writing = {name: set(job["permissions"]) for name, job in jobs.items() if "permissions" in job}
    assert writing == {
        ("release", "publish"): {"id-token"},
        ("release", "images"): {"contents", "packages", "id-token", "attestations"},
        ("release", "release"): {"contents"},
    }


def test_the_audit_reads_the_pins_of_all_that_is_installed_and_built() -> None:
    audited = set(re.findall(r"-r (\S+)", " ".join(commands("audit"))))
    pins = [*ROOT.glob("requirements/*.txt"), *ROOT.glob("docker/*.txt")]
    apart = {f"requirements/{name}{part}.txt" for name in ("legacy", "xla") for part in ("", "-torch")}
    assert audited == {path.relative_to(ROOT).as_posix() for path in pins} - apart


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
