"""Logins are found where docker and Kubernetes keep them, and shown nowhere."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.adapters import registry_login
from manycpu.pipeline.adapters.registry_login import (
    Login,
    docker_config,
    from_config,
    from_secret,
    write_docker_settings,
)
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Reference

PAIR = base64.b64encode(b"user:pass:word").decode()


def secret(config: object) -> dict[str, Any]:
    return {"data": {".dockerconfigjson": base64.b64encode(json.dumps(config).encode()).decode()}}


def image(name: str = "a.test/ml/train") -> Reference:
    return Reference.parse(name, "target.image")


@pytest.mark.parametrize("key", ["a.test", "https://a.test", "https://a.test/v1/"])
def test_a_registry_is_found_however_docker_wrote_it(key: str) -> None:
    assert from_config({"auths": {key: {"auth": PAIR}}}, "a.test") == Login("user", "pass:word")
    assert from_config({"auths": {key: {"auth": PAIR}}}, "b.test") is None


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("a.test", "a.test"),
        ("https://a.test/", "a.test"),
        ("https://a.test/v1/", "a.test"),
        ("https://a.test/v2/", "a.test"),
        ("a.test/ml", "a.test"),
        ("*.azurecr.io", "me.azurecr.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("https://index.docker.io/v2/", "docker.io"),
        ("https://docker.io", "docker.io"),
    ],
)
def test_a_secrets_key_may_have_what_kubernetes_accepts(key: str, registry: str) -> None:
    bad = {"auth": "%"}
    found = secret(
        {"auths": {"a.test.other": bad, "*.test.azurecr.io": bad, "a.test/m": bad, key: {"auth": PAIR}}}
    )
    assert from_secret(found, image(f"{registry}/ml/train")) == Login("user", "pass:word")
    assert from_secret(found, image("b.test/ml/train")) is None


def test_an_image_gets_the_login_of_its_own_path() -> None:
    auths = {key: {"username": key} for key in ("*.test", "a.test", "a.test/other", "a.test/ml", "a.test/m")}
    assert from_secret(secret({"auths": auths}), image("a.test/ml/train")) == Login("a.test/ml")
    assert from_secret(secret({"auths": auths}), image("a.test/train")) == Login("a.test")
    assert from_config({"auths": {"a.test/ml": {"auth": "%"}}}, "a.test") is None


def test_docker_hub_has_a_key_of_its_own() -> None:
    config = {"auths": {"https://index.docker.io/v1/": {"auth": PAIR}}}
    assert from_config(config, "docker.io") == Login("user", "pass:word")
    assert from_config(Login("user", "x").as_config("docker.io"), "docker.io") == Login("user", "x")


def test_an_empty_entry_is_no_login() -> None:
    assert from_config({"auths": {"a.test": {}}}, "a.test") is None


def test_an_entry_that_cannot_be_read_is_told() -> None:
    with pytest.raises(BadInputError, match=r"a\.test.*docker login"):
        from_config({"auths": {"a.test": {"auth": "%"}}}, "a.test")


@pytest.mark.parametrize("empty", ["auths", "credHelpers"])
def test_a_part_of_dockers_config_may_be_null(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({empty: None}))
    assert from_config(docker_config(), "a.test") is None
    write_docker_settings(tmp_path / "settings", {"a.test": {"auth": PAIR}})
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "settings"))
    assert from_config(docker_config(), "a.test") == Login("user", "pass:word")


@pytest.mark.parametrize("text", ["[]", "null", '{"auths": []}', '{"auths": {"a.test": "x"}}'])
def test_a_config_of_another_form_is_told(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(BadInputError, match=r"target\.registry_connection.*config.*cannot be read"):
        from_config(docker_config(str(file)), "a.test")
    with pytest.raises(BadInputError):
        from_secret(secret(json.loads(text)), image())


@pytest.mark.parametrize("config", [{"credHelpers": {"a.test": "tests"}}, {"credsStore": "tests"}])
def test_a_credential_helper_is_asked(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker-credential-tests"
    helper.write_text(
        '#!/bin/sh\nread host\n[ "$host" = a.test ] || exit 1\necho "a {warning}" >&2\n'
        'echo \'{"Username": "u", "Secret": "s"}\'\necho another >&2\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert from_config(config, "a.test") == Login("u", "s")
    assert from_config(config, "b.test") is None


@pytest.mark.parametrize("answer", ["{}", "null", "[1]", "nothing"])
def test_a_helper_whose_answer_is_no_login_is_named(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker-credential-tests"
    helper.write_text(f"#!/bin/sh\necho '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(BadInputError, match="docker-credential-tests get"):
        from_config({"credsStore": "tests"}, "a.test")


def test_a_helper_that_does_not_end_is_named_without_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker-credential-tests"
    helper.write_text('#!/bin/sh\necho \'{"Username": "u", "Secret": "hunter2"}\'\nexec sleep 60\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(registry_login, "_HELPER_TIMEOUT_S", 0.5)
    with pytest.raises(BadInputError, match=r"docker-credential-tests get' did not end within") as caught:
        from_config({"credsStore": "tests"}, "a.test")
    assert "hunter2" not in str(caught.value)


def test_a_helper_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInputError, match="docker-credential-absent"):
        from_config({"credsStore": "absent"}, "a.test")


def test_a_pull_secret_is_read_and_its_helpers_are_not_run() -> None:
    config = {"auths": {"a.test": {"username": "u", "password": "p"}}, "credsStore": "absent"}
    assert from_secret(secret(config), image()) == Login("u", "p")


def test_a_secret_of_another_kind_is_told() -> None:
    with pytest.raises(BadInputError, match=r"Secret token of type Opaque has no docker config"):
        from_secret({"metadata": {"name": "token"}, "type": "Opaque", "data": {}}, image())


def test_what_is_shown_of_a_login_has_no_secret() -> None:
    assert "pass" not in repr(Login("user", "pass", "passtoken"))


def test_dockers_config_may_be_absent_unless_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert docker_config() == {}
    with pytest.raises(BadInputError, match=r"target\.registry_connection.*no such file"):
        docker_config(str(tmp_path / "absent.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInputError, match="cannot be read"):
        docker_config()
