"""What is wrong with a run's images is found before anything is started, each by the field that is wrong."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import registry_server
from support.registry_images import push_base
from support.registry_server import PASSWORD, USER

from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.context import is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image.checks import check_images
from manycpu.pipeline.targets.open_run import open_context

Find = Callable[..., list[Finding]]
KNOWN = Access(registry_login={"username": USER, "password": PASSWORD})


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a registry that asks for a login, with images."""
    folder = tmp_path_factory.mktemp("registry")
    with registry_server.running(folder, registry_server.basic(folder)) as found:
        login = Login(USER, PASSWORD)
        push_base(found, login)
        push_base(found, login, "old", labels={"manycpu.torch": "2.4.1"}, env=["PYTHON_VERSION=3.9.18"])
        yield found


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Check a target."""

    def check(
        access: Access | None = None,
        needs: dict[str, str] | None = None,
        run: dict[str, str] | None = None,
        **target: object,
    ) -> list[Finding]:
        run = {"program": "question_answering", "output": str(tmp_path / "out"), **(run or {})}
        ctx = open_context(run, {"kind": "kubernetes", **target}, "test", base=tmp_path, access=access)
        assert is_on_kubernetes(ctx)
        return list(check_images(replace(ctx, needs=needs or {})))

    return check


def fatal(findings: list[Finding]) -> dict[str, str]:
    """Field -> message of those that are fatal."""
    return {finding.field: finding.message for finding in findings if finding.fatal}


@pytest.mark.parametrize(
    ("target", "lacks"),
    [
        ({"build_args": {"HELPER_REQUIREMENTS": "'s3fs>=2024.12' boto3"}}, {"run.output": "gcsfs"}),
        ({"build_args": {"HELPER_REQUIREMENTS": "fsspec[s3,gs]"}}, {}),
        ({"build_args": {"HELPER_REQUIREMENTS": "-r helper.txt"}}, {}),
        ({}, {"run.data": "s3fs", "run.output": "gcsfs"}),
        ({"helper_image": "base:1"}, {}),
    ],
)
def test_a_package_that_a_built_helper_image_will_lack_is_a_warning(
    locked: str, find: Find, target: dict[str, Any], lacks: dict[str, str]
) -> None:
    target = {
        name: v.replace("LOCKED", locked) if name == "helper_image" else v for name, v in target.items()
    }
    run = {"data": "s3://sets/digits", "model": "hf://prajjwal1/bert-tiny", "output": "gs://models/qa"}
    found = find(KNOWN, run=run, registry=f"http://{locked}/ml", **target)
    warnings = {each.field: each.message for each in found if each.field.startswith("run.")}
    assert not fatal([each for each in found if each.field.startswith("run.")])
    assert warnings == {field: f"the helper image will lack {package}" for field, package in lacks.items()}


def test_pods_without_a_login_are_a_warning(locked: str, find: Find) -> None:
    (warning,) = find(KNOWN, registry=f"http://{locked}/ml", image=f"{locked}/base:1")
    assert (warning.field, warning.fatal) == ("target.registry", False)
    assert "asks for a login, and the pods have none" in warning.message


def test_an_image_that_is_not_there_is_named_by_its_field(locked: str, find: Find) -> None:
    found = fatal(
        find(KNOWN, registry=f"http://{locked}/ml", image=f"{locked}/base:1", helper_image=f"{locked}/base:2")
    )
    assert found == {"target.helper_image": f"there is no image {locked}/base:2"}


def test_an_image_that_is_too_old_is_refused(locked: str, find: Find) -> None:
    findings = find(KNOWN, registry=f"http://{locked}/ml", image=f"{locked}/base:old")
    python, torch = (finding.message for finding in findings if finding.field == "target.image")
    assert "has Python 3.9.18; manycpu's node part needs 3.11 or later" in python
    assert "has torch 2.4.1; manycpu's node part needs 2.6 or later" in torch


def test_an_image_of_other_versions_than_the_notebook_is_refused(locked: str, find: Find) -> None:
    here = {"registry": f"http://{locked}/ml", "image": f"{locked}/base:old"}
    told = [finding.message for finding in find(KNOWN, {"Python": "3.11", "torch": "2.4.1"}, **here)]
    assert any("has Python 3.9.18, and the notebook 3.11" in message for message in told)
    assert not any("and the notebook 2.4.1" in message for message in told)


@pytest.mark.parametrize("access", [None, Access(registry_login={"username": USER, "password": "no"})])
def test_who_may_not_push_is_told_so(locked: str, find: Find, access: Access | None) -> None:
    found = fatal(find(access, registry=f"http://{locked}/ml", image=f"{locked}/base:1"))
    assert list(found) == ["target.registry"]
    assert "401" in found["target.registry"]


def test_a_registry_that_is_away_is_told_within_seconds(find: Find) -> None:
    found = fatal(find(registry="127.0.0.1:9/ml", image="127.0.0.1:9/base:1"))
    assert "does not answer" in found["target.registry"]


def test_neither_registry_nor_image_is_refused(find: Find) -> None:
    assert list(fatal(find())) == ["target.registry"]


def test_a_docker_config_that_is_not_there_is_named(locked: str, find: Find, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.json")
    (found,) = find(registry=f"http://{locked}/ml", image=f"{locked}/base:1", registry_connection=absent)
    assert found.field == "target.registry_connection"
    assert "there is no such file" in found.message


def test_dockers_own_login_is_used(
    locked: str, find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Login(USER, PASSWORD).as_config(locked)))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert fatal(find(registry=f"http://{locked}/ml", image=f"{locked}/base:1")) == {}


def test_a_builder_that_is_not_installed_is_named(
    locked: str, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = fatal(find(KNOWN, registry=f"http://{locked}/ml", builder="buildah"))
    assert found == {"target.builder": "there is no program buildah on this machine"}


def test_images_on_the_nodes_are_not_looked_for(find: Find) -> None:
    assert find(image="manycpu.local/train:1", pull_policy="Never") == []
