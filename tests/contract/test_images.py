"""The program's code reaches an image as one small layer, and layers that exist are not pushed again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from support import registry_server
from support.registry_images import files, pull, push_base
from support.registry_server import PASSWORD, USER

from manycpu.pipeline.adapters.registry import Connection, Repository
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.spec.placement import CODE, LIB
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes import build
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image import images
from manycpu.pipeline.targets.open_run import open_context

Context = Callable[..., ClusterContext]


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a registry that is open to all, with an image `base:1`."""
    with registry_server.running(tmp_path_factory.mktemp("registry")) as found:
        push_base(found)
        yield found


@pytest.fixture
def planned(tmp_path: Path) -> Context:
    """Describe a run whose program is `code/train.py`."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('one')")
    (folder / "large.txt").write_text("x" * 100_000)

    def make(
        access: Access | None = None, program: str = "code/train.py", **target: object
    ) -> ClusterContext:
        run = {"program": program, "output": str(tmp_path / "out")}
        made = open_context(run, {"kind": "kubernetes", **target}, "test", base=tmp_path, access=access)
        assert is_on_kubernetes(made)
        return made

    return make


def test_code_and_manycpu_are_put_upon_the_image(stocked: str, planned: Context) -> None:
    built, reused = build.build(planned(registry=f"http://{stocked}/ml", image=f"{stocked}/base:1"))
    assert not reused
    assert (built.code, built.program) == (CODE, ("train.py",))
    assert built.image
    assert built.image.startswith(f"{stocked}/ml/manycpu@sha256:")
    image = pull(built.image)
    assert image.settings["WorkingDir"] == CODE
    assert image.settings["User"] == "1000"
    assert image.labels["org.opencontainers.image.base.digest"] == pull(f"{stocked}/base:1").digest
    assert image.env == {"PATH": "/bin", "PYTHONPATH": f"{LIB}:/theirs"}
    assert files(built.image, 2) == {
        "opt/manycpu/code/large.txt": b"x" * 100_000,
        "opt/manycpu/code/train.py": b"print('one')",
    }
    assert "opt/manycpu/lib/manycpu/pipeline/node/__main__.py" in files(built.image, 1)


def test_what_is_there_is_used_again(stocked: str, planned: Context) -> None:
    ctx = planned(registry=f"http://{stocked}/again", image=f"{stocked}/base:1")
    first, second = build.build(ctx), build.build(ctx)
    assert second[0] == first[0]
    assert (first[1], second[1]) == (False, True)


@pytest.mark.parametrize("number", [0, -1], ids=["of the base", "of the code"])
def test_a_layer_that_the_registry_has_lost_is_pushed_again(
    stocked: str, planned: Context, number: int
) -> None:
    ctx = planned(registry=f"http://{stocked}/lost{number}", image=f"{stocked}/base:1")
    built, _ = build.build(ctx)
    lost = pull(built.image or "").layers[number]["digest"]
    url = f"http://{stocked}/v2/lost{number}/manycpu/blobs/{lost}"
    assert requests.delete(url, timeout=60).ok
    assert requests.head(url, timeout=60).status_code == 404
    assert build.build(ctx) == (built, False)
    assert requests.head(url, timeout=60).ok


def test_a_change_of_the_code_changes_one_small_layer(stocked: str, planned: Context, tmp_path: Path) -> None:
    ctx = planned(registry=f"http://{stocked}/change", image=f"{stocked}/base:1")
    before, _ = build.build(ctx)
    (tmp_path / "code" / "train.py").write_text("print('two')")
    after, reused = build.build(ctx)
    assert not reused
    old, new = pull(before.image or "").layers, pull(after.image or "").layers
    assert old[:2] == new[:2]
    assert old[2] != new[2]
    assert new[2]["size"] < 1000


def test_an_image_of_another_registry_is_brought_whole(
    stocked: str, planned: Context, tmp_path: Path
) -> None:
    with registry_server.running(tmp_path / "registry") as other:
        built, _ = build.build(planned(registry=f"http://{other}/ml", image=f"http://{stocked}/base:1"))
        image = pull(built.image or "")
        named = Reference.parse(built.image or "", "test")
        connection = Connection(other, plain=True)
        mine = Repository(connection, named.repository)
        assert all(mine.has(layer["digest"]) for layer in image.layers)
        connection.close()


def test_helper_pods_have_manycpu_and_no_code(stocked: str, planned: Context) -> None:
    ctx = planned(registry=f"http://{stocked}/ml", image="unused", helper_image=f"{stocked}/base:1")
    reference = images.helper(ctx)
    assert reference == images.helper(ctx)
    image = pull(reference)
    assert len(image.layers) == 2
    assert image.env["PYTHONPATH"].startswith(LIB)
    assert "WorkingDir" not in image.settings


def test_a_recipe_needs_no_code(stocked: str, planned: Context) -> None:
    ctx = planned(registry=f"http://{stocked}/ml", image=f"{stocked}/base:1", program="question_answering")
    built, _ = build.build(ctx)
    assert built.code is None
    assert len(pull(built.image or "").layers) == 2


def test_without_a_registry_an_image_with_this_code_is_taken_as_it_is(
    stocked: str, planned: Context, tmp_path: Path
) -> None:
    built, _ = build.build(planned(registry=f"http://{stocked}/done", image=f"{stocked}/base:1"))
    finished = planned(image=f"http://{built.image}")
    assert build.build(finished) == (built, True)
    assert images.helper(finished) == built.image
    (tmp_path / "code" / "train.py").write_text("print('two')")
    with pytest.raises(BadInputError, match=r"^target\.registry: .*no registry to push it to"):
        build.build(finished)


def test_without_a_registry_an_image_on_the_nodes_is_known_by_its_tag(stocked: str, planned: Context) -> None:
    ctx = planned(registry=f"http://{stocked}/nodes", image=f"{stocked}/base:1")
    built, _ = build.build(ctx)
    image = pull(built.image or "")
    tag = "-".join(["ab" * 6, image.labels["manycpu.lib"][:12], image.labels["manycpu.code"][:12]])
    on_nodes = f"manycpu.local/train:{tag}"
    assert build.build(planned(image=on_nodes, pull_policy="Never"))[0].image == on_nodes
    with pytest.raises(BadInputError, match=r"^target\.registry"):
        build.build(planned(image="manycpu.local/train:other", pull_policy="Never"))


def test_the_login_of_a_connection_is_used(planned: Context, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    with registry_server.running(folder, registry_server.basic(folder)) as host:
        push_base(host, Login(USER, PASSWORD))
        target = {"registry": f"http://{host}/ml", "image": f"{host}/base:1"}
        known = Access(registry_login={"username": USER, "password": PASSWORD})
        assert build.build(planned(known, **target))[0].image
        config = tmp_path / "config.json"
        config.write_text(json.dumps(Login(USER, PASSWORD).as_config(host)))
        assert build.build(planned(**target, registry_connection=str(config)))[1]
        with pytest.raises(BuildError, match="without a login with 401"):
            build.build(planned(**target))
