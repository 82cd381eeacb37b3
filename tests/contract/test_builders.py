"""A Dockerfile is built once for the same files, arguments and base, by what the worker has."""

import base64
import io
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import docker_daemon, registry_server
from support.registry_images import files, pull, push_base
from support.registry_server import PASSWORD, USER

from manycpu.pipeline.adapters.archive import Archive
from manycpu.pipeline.adapters.commands import follow
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.display import Display
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.build import save_image
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image import base_image
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Build, Recipe
from manycpu.pipeline.targets.kubernetes.image.builders import WORKERS, Place
from manycpu.pipeline.targets.kubernetes.image.checks import check_images
from manycpu.pipeline.targets.kubernetes.image.registries import registries
from manycpu.pipeline.targets.open_run import open_context

Context = Callable[..., ClusterContext]
LOGIN = Login(USER, PASSWORD)
DOCKERFILE = """
ARG BASE
FROM ${BASE}
ARG WORD=none
COPY hello /hello
RUN --mount=type=bind,source=.,target=/context read -r hello </context/hello; echo "so it says $hello"
LABEL word=${WORD}
"""
both = pytest.mark.parametrize("builder", ["buildah", "docker"], indirect=True)
docker = pytest.mark.parametrize("builder", ["docker"], indirect=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a registry that asks for a login, with an image `base:1` that has a shell."""
    folder = tmp_path_factory.mktemp("registry")
    with registry_server.running(folder, registry_server.basic(folder)) as found:
        push_base(found, LOGIN, shell=docker_daemon.busybox())
        yield found


@pytest.fixture(scope="module")
def daemon(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run docker's daemon."""
    with docker_daemon.running(tmp_path_factory.mktemp("docker"), host) as found:
        yield found


@pytest.fixture
def builder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have a builder on this machine that leaves nothing on it: buildah, unless a test names another."""
    name = getattr(request, "param", "buildah")
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "config.json").write_text(json.dumps({"cliPluginsExtraDirs": docker_daemon.plugins()}))
    monkeypatch.setenv("DOCKER_CONFIG", str(settings))
    if name == "docker":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("daemon"))
        monkeypatch.setenv("PATH", f"{docker_daemon.client()}:{os.environ['PATH']}")
    elif not shutil.which("buildah"):
        pytest.skip("no buildah here (tests/system-packages installs it)")
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    return name


@pytest.fixture
def context(host: str, builder: str, tmp_path: Path) -> Context:
    """Describe a run that has a Dockerfile in `docker/`."""
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "Dockerfile").write_text(DOCKERFILE.replace("BASE\n", f"BASE={host}/base:1\n"))
    (folder / "hello").write_text("one\n")

    def make(**target: object) -> ClusterContext:
        fields: dict[str, object] = {
            "kind": "kubernetes",
            "builder": builder,
            "registry": f"http://{host}/built",
        }
        fields |= {"dockerfile": "docker/Dockerfile", **target}
        run = {"program": "question_answering", "output": str(tmp_path / "out")}
        access = Access(registry_login={"username": USER, "password": PASSWORD})
        made = open_context(run, fields, "test", base=tmp_path, access=access)
        assert is_on_kubernetes(made)
        return made

    return make


def build(ctx: ClusterContext) -> Reference:
    """Name the training image's base, after building it if need be."""
    with registries(ctx) as opened:
        return base_image.image(ctx, "train", opened)


def left(builder: str) -> str:
    """List a builder's containers, and manycpu's objects in it."""
    names = {"buildah": ("containers", "images"), "docker": ("ps", "images")}[builder]
    every = {"buildah": [], "docker": ["--all"]}[builder]
    commands = ([names[0], "-q", *every], [names[1], "-q", "--filter", "reference=localhost/manycpu"])
    return "".join(subprocess.check_output([builder, *command], text=True) for command in commands)


@both
def test_what_the_dockerfile_says_is_in_the_registry(context: Context, builder: str) -> None:
    reference = build(context(build_args={"WORD": f"of-{builder}"}))
    image = pull(str(reference), LOGIN)
    assert image.labels["word"] == f"of-{builder}"
    layers = [files(str(reference), number, LOGIN) for number in range(len(image.layers))]
    assert any(layer.get("hello") == b"one\n" for layer in layers)
    assert left(builder) == ""


@both
def test_the_login_is_in_no_image_and_in_no_log(
    context: Context, builder: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manycpu")
    reference = str(build(context(build_args={"WORD": f"secretive-{builder}"})))
    # Of the step itself: what a short one prints, buildah may lose on a busy machine.
    assert "so it says" in caplog.text
    image = pull(reference, LOGIN)
    parts = [b"".join(files(reference, number, LOGIN).values()) for number in range(len(image.layers))]
    told = b"\n".join([*parts, image.config_bytes, caplog.text.encode()])
    for word in (PASSWORD.encode(), base64.b64encode(f"{USER}:{PASSWORD}".encode())):
        assert word not in told


def test_the_command_shows_the_log_of_a_build(context: Context) -> None:
    shown = io.StringIO()
    with Display(Console(file=shown)):
        build(context(build_args={"WORD": "shown"}))
    assert "STEP 1" in shown.getvalue()
    logging.getLogger("manycpu.build").info("later")
    assert "later" not in shown.getvalue()


def test_only_what_changes_the_image_builds_it_anew(context: Context, tmp_path: Path) -> None:
    first = build(context())
    assert build(context()) == first
    assert build(context(build_args={"WORD": "other"})) != first
    (tmp_path / "docker" / "hello").write_text("two")
    assert build(context()) != first


def test_what_is_there_needs_no_builder(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(context())
    monkeypatch.setenv("PATH", "/nowhere")
    assert build(context()) == first


@both
def test_a_build_that_fails_tells_its_last_lines_and_leaves_nothing(
    context: Context, builder: str, tmp_path: Path
) -> None:
    dockerfile = tmp_path / "docker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN echo so it ends && exit 3\n")
    with pytest.raises(
        BuildError, match=rf"(?s)^target\.dockerfile: .*{builder} bu\w+ ended with.*so it ends.* 3\b"
    ):
        build(context())
    assert left(builder) == ""


@both
def test_a_builder_that_is_not_there_is_named(
    context: Context, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match=f"'{builder}' cannot be run"):
        build(context(build_args={"WORD": f"absent-{builder}"}))


def test_an_argument_that_the_dockerfile_does_not_know_is_refused(context: Context) -> None:
    with pytest.raises(BadInputError, match=r"^target\.build_args: .*no argument TORCHES.*TORCH_INDEX"):
        build(context(dockerfile=None, build_args={"TORCHES": "2"}))


@both
def test_what_is_built_here_needs_no_registry_to_be_saved(
    host: str, context: Context, tmp_path: Path
) -> None:
    _configure(LOGIN.as_config(host))
    ctx = context(registry=None, helper_image=f"http://{host}/base:1", build_args={"WORD": "saved"})
    name = save_image(ctx, tmp_path / "image.tar")
    assert name.startswith("manycpu.local/train:")
    assert Archive(tmp_path / "image.tar").image.labels["word"] == "saved"


@docker
def test_the_users_docker_settings_are_kept_but_for_the_login(
    host: str, daemon: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _configure({"auths": {host: {"auth": "bm86bm8="}}, "credHelpers": {host: "absent"}})
    monkeypatch.delenv("DOCKER_HOST")
    subprocess.run(["docker", "context", "create", "mine", "--docker", f"host={daemon}"], check=True)
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    assert pull(str(build(context(build_args={"WORD": "mine"}))), LOGIN).labels["word"] == "mine"
    assert _configure({}) == before


@docker
def test_a_base_that_docker_has_may_be_older(context: Context, host: str) -> None:
    base = f"{host}/base:moved"
    push_base(host, LOGIN, "moved", labels={"age": "old"}, shell=docker_daemon.busybox())
    _configure(LOGIN.as_config(host))
    subprocess.run(["docker", "pull", "--quiet", base], check=True)
    push_base(host, LOGIN, "moved", labels={"age": "new"}, shell=docker_daemon.busybox())
    assert pull(str(build(context(build_args={"BASE": base}))), LOGIN).labels["age"] == "new"


@pytest.mark.parametrize("in_registry", [True, False])
def test_buildah_looks_a_base_up_again_only_if_a_registry_has_it(
    tmp_path: Path, *, in_registry: bool
) -> None:
    """Its local copy may be older; version 1.28 looks it up by default, newer versions do not."""
    recipe = Recipe(stage="train", target=None, text="FROM a/b\n", arguments=(), files=())
    wanted = Build(recipe, Reference("a.test", "ml/manycpu", "train-1"), from_registry=in_registry)
    (make, _), _ = WORKERS["buildah"].commands(wanted, Place("localhost/b:1", tmp_path, tmp_path))
    assert ("--pull-always" in make) is in_registry


@both
def test_two_that_build_one_image_at_once_do_not_remove_each_others(
    context: Context, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = context(build_args={"WORD": f"twice-{builder}"})
    second: list[str] = []

    def follow_with_a_second(command: list[str], *args: Any, **more: Any) -> int:
        if command[1] in {"push", "save"} and not second:  # the first has built, and not yet saved
            second.append("begins")
            second.append(str(build(ctx)))
        return follow(command, *args, **more)

    monkeypatch.setattr(base_image, "follow", follow_with_a_second)
    assert str(build(ctx)) == second[-1]
    assert left(builder) == ""


@docker
def test_dockers_classic_builder_builds_what_it_can(
    context: Context, builder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    dockerfile = tmp_path / "docker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("--mount=type=bind,source=.,target=/context ", ""))
    dockerfile.write_text(dockerfile.read_text().replace("/context/hello", "/hello"))
    image = pull(str(build(context(build_args={"WORD": "classic"}))), LOGIN)
    assert image.labels["word"] == "classic"
    dockerfile.write_text(dockerfile.read_text() + "RUN exit 3\n")
    with pytest.raises(BuildError, match=r"(?s)docker build ended with.*exit 3"):
        build(context())
    assert left(builder) == ""


@docker
def test_a_docker_without_buildkit_is_told_what_to_install(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    with pytest.raises(BadInputError, match=r"^target\.builder: .*needs BuildKit.*Install.*buildx"):
        build(context(build_args={"WORD": "without"}))
    found = [finding for finding in check_images(context(dockerfile=None)) if finding.fatal]
    assert [finding.field for finding in found] == ["target.builder"]


def _configure(more: dict[str, object]) -> dict[str, object]:
    """Put more into docker's settings; all that is there now."""
    file = Path(os.environ["DOCKER_CONFIG"], "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return dict(json.loads(file.read_text()))
