"""A Dockerfile is built once for the same files, arguments and base, by what the worker has."""

import base64
import io
import json
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import registry_program
from registry_images import files, pull, push_base
from registry_program import PASSWORD, USER
from rich.console import Console

from manycpu.pipeline.adapters.archive import Archive
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.display import Display
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.verbs.context import Access, ClusterContext, open_context
from manycpu.pipeline.verbs.on_kubernetes import dependencies
from manycpu.pipeline.verbs.on_kubernetes.registries import registries
from manycpu.pipeline.verbs.on_kubernetes.save import save

pytestmark = pytest.mark.skipif(
    not shutil.which("buildah"), reason="no buildah here (tests/system-packages installs it)"
)
Context = Callable[..., ClusterContext]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a registry that asks for a login, with an image `base:1`."""
    folder = tmp_path_factory.mktemp("registry")
    with registry_program.running(folder, registry_program.basic(folder)) as found:
        push_base(found, Login(USER, PASSWORD))
        yield found


@pytest.fixture
def context(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Describe a run that has a Dockerfile in `docker/`."""
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "Dockerfile").write_text(
        f"ARG BASE={host}/base:1\nFROM ${{BASE}}\nARG WORD=none\nCOPY hello /hello\nLABEL word=${{WORD}}\n"
    )
    (folder / "hello").write_text("one")

    def make(**target: object) -> ClusterContext:
        fields: dict[str, object] = {"kind": "kubernetes", "builder": "buildah", "registry": f"{host}/built"}
        fields |= {"dockerfile": "docker/Dockerfile", **target}
        run = {"program": "question_answering", "output": str(tmp_path / "out")}
        access = Access(registry_login={"username": USER, "password": PASSWORD})
        made = open_context(run, fields, "test", base=tmp_path, access=access)
        assert isinstance(made, ClusterContext)
        return made

    return make


def build(ctx: ClusterContext) -> Reference:
    """Name the training image's base, after building it if need be."""
    with registries(ctx) as opened:
        return dependencies.image(ctx, "train", opened)


def test_what_the_dockerfile_says_is_in_the_registry(context: Context) -> None:
    login = Login(USER, PASSWORD)
    reference = build(context(build_args={"WORD": "given"}))
    image = pull(str(reference), login)
    assert image.labels["word"] == "given"
    assert files(str(reference), -1, login) == {"hello": b"one"}


def test_the_login_is_in_no_image_and_in_no_log(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "manycpu")
    login = Login(USER, PASSWORD)
    reference = str(build(context(build_args={"WORD": "secretive"})))
    assert "STEP" in caplog.text
    image = pull(reference, login)
    parts = [b"".join(files(reference, number, login).values()) for number in range(len(image.layers))]
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


def test_a_build_that_fails_tells_its_last_lines_and_leaves_nothing(context: Context, tmp_path: Path) -> None:
    dockerfile = tmp_path / "docker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "COPY nothing /nothing\n")
    with pytest.raises(BuildError, match=r"(?s)^target\.dockerfile: .*buildah bud ended with.*nothing"):
        build(context())
    for command in (["containers", "-q"], ["images", "-q", "--filter", "reference=localhost/manycpu"]):
        left = subprocess.run(["buildah", *command], check=True, capture_output=True, text=True)
        assert left.stdout == ""


def test_a_builder_that_is_not_there_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match="'buildah' cannot be run"):
        build(context(build_args={"WORD": "absent"}))


def test_an_argument_that_the_dockerfile_does_not_know_is_refused(context: Context) -> None:
    with pytest.raises(BadInputError, match=r"^target\.build_args: .*no argument TORCHES.*TORCH_INDEX"):
        build(context(dockerfile=None, build_args={"TORCHES": "2"}))


def test_what_is_built_here_needs_no_registry_to_be_saved(
    host: str, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Login(USER, PASSWORD).as_config(host)))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    name = save(context(registry=None, build_args={"WORD": "saved"}), tmp_path / "image.tar")
    assert name.startswith("manycpu.local/train:")
    image = Archive(tmp_path / "image.tar").image
    assert (image.labels["word"], len(image.layers)) == ("saved", 3)
