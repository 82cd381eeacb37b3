"""An unprivileged pod builds images in a separate namespace, and leaves nothing there."""

import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import jobs
from cluster.fixtures import POD_SECURITY, TestCluster
from cluster.space import Space
from kubernetes import client
from support import builder_image
from support.registry_images import pull

from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets import open_run
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image import base_image, images
from manycpu.pipeline.targets.kubernetes.image.builders import PODS
from manycpu.pipeline.targets.kubernetes.image.registries import registries

Fields = dict[str, Any]
pytestmark = pytest.mark.pod_security("restricted")
PROJECT = Path(__file__).parents[2]
# To compile BuildKit takes ten minutes on a new machine.
BUILDKIT = pytest.param("buildkit", marks=pytest.mark.long)
both = pytest.mark.parametrize("pod_builder", ["pod", BUILDKIT], indirect=True)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Download what a helper image installs: builds in the cluster cannot reach a package index."""
    folder = tmp_path_factory.mktemp("context")
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder / "wheels")]
    fetch += ["--only-binary", ":all:", "--python-version", _python()]
    subprocess.run([*fetch, "--require-hashes", "-r", str(PROJECT / "docker" / "helper.txt")], check=True)
    subprocess.run([*fetch, "pip"], check=True)
    return folder


def _python() -> str:
    from cluster import layers

    return layers.PYTHON[layers.suite()]


@pytest.fixture
def pod_builder(request: pytest.FixtureRequest, builds: Space) -> str:
    """Return the builder, buildah by default, and give its namespace the Pod Security level that it needs."""
    name = getattr(request, "param", "pod")
    labels = {POD_SECURITY: PODS[name].level}
    client.CoreV1Api(builds.admin).patch_namespace(builds.name, {"metadata": {"labels": labels}})
    return name


@pytest.fixture
def build(target: Fields, pod_builder: str, builds: Space, tmp_path: Path) -> Callable[..., ClusterContext]:
    """Return a function that opens a run whose images are built in the namespace for builds."""
    del target["image"], target["helper_image"]
    fields = {"builder": pod_builder, "builder_image": builder_image.reference(pod_builder)}
    fields["build_namespace"] = builds.name

    def make(**more: Any) -> ClusterContext:
        run = {"program": "question_answering", "output": str(tmp_path / "out")}
        ctx = open_run.open_context(run, target | fields | more, tmp_path.name, base=tmp_path)
        assert is_on_kubernetes(ctx)
        ctx.ledger.open(ctx.new_entry(0))
        return ctx

    return make


def dependency(ctx: ClusterContext) -> Reference:
    """Return the reference of the training image's base; build it if necessary."""
    with registries(ctx) as opened:
        return base_image.image(ctx, "train", opened)


def left(builds: Space) -> list[str]:
    """Return the names of the pods and secrets in the namespace for builds."""
    core = client.CoreV1Api(builds.admin)
    found = [*core.list_namespaced_pod(builds.name).items, *core.list_namespaced_secret(builds.name).items]
    return [item.metadata.name for item in found]


def test_the_helper_image_is_built_from_our_dockerfile(
    build: Callable[..., ClusterContext], builds: Space, namespace: Space, wheels: Path
) -> None:
    arguments = {"BASE_IMAGE": builder_image.with_history("base"), "WHEELS": "wheels"}
    ctx = build(build_args=arguments, context=str(wheels))
    reference = images.helper(ctx)
    assert left(builds) == []
    assert ctx.ledger.read().elsewhere == {}
    code = "import os, pydantic, fsspec, huggingface_hub; import manycpu.pipeline.transfer as t; "
    code += "print(os.getuid(), t.__file__.startswith('/opt/manycpu/lib/'))"
    namespace.create(_restricted(jobs.pod("try", reference, "python3", "-c", code)))
    namespace.wait_pod("try", "Succeeded")
    assert namespace.log("try") == "1000 True\n"
    assert images.helper(ctx) == reference


@both
def test_the_users_own_dockerfile_is_built_in_the_cluster(
    build: Callable[..., ClusterContext], builds: Space, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {builder_image.with_history('base')}\nARG WORD\nCOPY hello /hello\n"
        "RUN test \"$(cat /hello)\" = one && useradd -m tester && su tester -c 'id -un >/tmp/who'\n"
        "LABEL word=$WORD\n"
    )
    (tmp_path / "hello").write_text("one")
    word = f"$(HOME) {secrets.token_hex(4)}"  # different each time, since the registry outlives the test
    ctx = build(dockerfile=str(tmp_path / "Dockerfile"), build_args={"WORD": word})
    image = pull(str(dependency(ctx)))
    assert image.labels["word"] == word
    assert left(builds) == []


@both
def test_a_build_that_fails_tells_why_and_leaves_nothing(
    build: Callable[..., ClusterContext], builds: Space, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {builder_image.with_history('base')}\nRUN echo so it ends && exit 3\n"
    )
    ctx = build(dockerfile=str(tmp_path / "Dockerfile"))
    with pytest.raises(
        BuildError, match=r"(?s)^target\.dockerfile: .*ended with.*so it ends.*exit (status|code:) 3"
    ):
        dependency(ctx)
    assert left(builds) == []
    assert ctx.ledger.read().elsewhere == {}


def test_a_builder_that_is_not_there_is_named(
    cluster: TestCluster, build: Callable[..., ClusterContext], builds: Space
) -> None:
    ctx = build(builder_image=f"{cluster.registry}/builder:absent")
    with pytest.raises(BuildError, match=r"builder/manifests/absent.*404"):
        dependency(ctx)
    assert left(builds) == []


def _restricted(pod: Fields) -> Fields:
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod["spec"]["containers"][0]["securityContext"] = own
    pod["spec"]["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return pod
