"""Names of images are read as docker reads them; what is put upon an image changes nothing else of it."""

import gzip
import json
from typing import Any

import pytest

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import DOCKER, OCI, Change, Image, Layer, Reference, sha256

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("docker.io/python:3.12", "docker.io/library/python:3.12"),
        ("index.docker.io/intel/python", "docker.io/intel/python:latest"),
        ("intel/python:3.12", "docker.io/intel/python:3.12"),
        ("localhost/train", "localhost/train:latest"),
        ("10.0.0.1:5000/a/b_c/d:1", "10.0.0.1:5000/a/b_c/d:1"),
        ("http://registry:5000/train", "registry:5000/train:latest"),
        (f"quay.io/a/b:1@{DIGEST}", f"quay.io/a/b@{DIGEST}"),
    ],
)
def test_a_name_is_read_as_docker_reads_it(text: str, whole: str) -> None:
    assert str(Reference.parse(text, "target.image")) == whole


@pytest.mark.parametrize("text", ["", "A/b", "quay.io/", "quay.io/a b", "quay.io/a@sha256:12", "ftp://a.b/c"])
def test_what_is_no_name_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(BadInputError, match=r"^target\.image: .*is no image's name"):
        Reference.parse(text, "target.image")


def test_http_before_a_name_asks_for_plain_http() -> None:
    assert Reference.parse("http://registry:5000/train", "target.image").plain
    assert not Reference.parse("https://registry:5000/train", "target.image").plain


def made(media_type: str = OCI, **settings: Any) -> Image:
    """Make an image with one layer."""
    config = {
        "os": "linux",
        "architecture": "amd64",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": ["sha256:1"]},
        "history": [{"created_by": "base"}],
    }
    config_bytes = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": {"digest": sha256(config_bytes), "size": len(config_bytes)},
        "layers": [{"mediaType": "first", "digest": "sha256:1", "size": 1}],
    }
    return Image(json.dumps(manifest).encode(), config_bytes, media_type)


def layer(content: bytes = b"x") -> Layer:
    """Make a layer."""
    return Layer(gzip.compress(content, mtime=0), sha256(content), "a test")


@pytest.mark.parametrize(
    ("media_type", "kind"),
    [
        (OCI, "application/vnd.oci.image.layer.v1.tar+gzip"),
        (DOCKER, "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    ],
)
def test_a_layer_is_appended_in_the_words_of_the_image(media_type: str, kind: str) -> None:
    upon, top = made(media_type), layer()
    changed = upon.changed(Change([top], {}, {}))
    assert changed.layers == [
        *upon.layers,
        {"mediaType": kind, "digest": sha256(top.content), "size": len(top.content)},
    ]
    assert changed.config["rootfs"]["diff_ids"] == ["sha256:1", sha256(b"x")]
    assert [entry["created_by"] for entry in changed.config["history"]] == ["base", "a test"]
    assert changed.manifest["config"]["digest"] == sha256(changed.config_bytes)
    assert changed.manifest["config"]["size"] == len(changed.config_bytes)


def test_settings_that_are_not_changed_stay() -> None:
    settings: dict[str, Any] = {
        "Env": ["PATH=/bin", "A=b=c"],
        "User": "1000",
        "WorkingDir": "/w",
        "Labels": {"a": "b"},
    }
    base = made(**settings)
    changed = base.changed(Change([], {"X": "1"}, {"c": "d"}))
    assert changed.env == {"PATH": "/bin", "A": "b=c", "X": "1"}
    assert changed.labels == {"a": "b", "c": "d", "org.opencontainers.image.base.digest": base.digest}
    assert (changed.settings["User"], changed.settings["WorkingDir"]) == ("1000", "/w")


def test_pythonpath_goes_before_what_is_there_once() -> None:
    change = Change([], {"PYTHONPATH": "/lib"}, {})
    first = made(Env=["PYTHONPATH=/theirs"]).changed(change)
    assert first.env["PYTHONPATH"] == "/lib:/theirs"
    assert first.changed(change).env["PYTHONPATH"] == "/lib:/theirs"


def test_the_same_change_makes_the_same_image() -> None:
    change = Change([layer()], {"A": "b"}, {"c": "d"}, "/w")
    assert made().changed(change) == made().changed(change)
    assert made().changed(change).digest != made().changed(Change([layer(b"y")], {}, {})).digest
