"""The builder's pod: what it runs, what it is given, and that Pod Security `baseline` takes it."""

from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.verbs.context import ClusterContext, open_context
from manycpu.pipeline.verbs.on_kubernetes.builder_pod import manifest
from manycpu.pipeline.verbs.on_kubernetes.building import Build
from manycpu.pipeline.verbs.on_kubernetes.recipe import Stage, recipe


def context(folder: Path, **target: Any) -> ClusterContext:
    """Describe a run."""
    run = {"program": "question_answering", "output": str(folder / "out")}
    made = open_context(run, {"kind": "kubernetes", "namespace": "ml", **target}, "test", base=folder)
    assert isinstance(made, ClusterContext)
    return made


def pod(ctx: ClusterContext, *files: str, stage: Stage = "train") -> dict[str, Any]:
    """Make the builder's pod."""
    wanted = Build(recipe(ctx, stage), Reference("a.test", "ml/manycpu", "train-1"))
    return manifest(ctx, wanted, "a.test/builder@sha256:1", files, [])


def test_it_builds_the_stage_with_its_arguments(tmp_path: Path) -> None:
    ctx = context(
        tmp_path, build_args={"TORCH": "2.8.0", "HELPER_REQUIREMENTS": "s3fs", "PACKAGES": "$(HOME)"}
    )
    made = pod(ctx)
    assert made["metadata"]["name"] == f"{ctx.name}-build-train"
    assert made["metadata"]["labels"]["manycpu/run"] == ctx.name
    command = made["spec"]["containers"][0]["command"]
    assert command[4:] == [
        "a.test/ml/manycpu:train-1",
        "--target",
        "train",
        "--build-arg",
        "PACKAGES=$$(HOME)",
        "--build-arg",
        "TORCH=2.8.0",
    ]


def test_pod_security_baseline_takes_it(tmp_path: Path) -> None:
    spec = pod(context(tmp_path))["spec"]
    (container,) = spec["containers"]
    assert set(container["securityContext"]) == {"runAsUser", "runAsGroup"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec)
    assert all(set(volume) <= {"name", "emptyDir", "secret"} for volume in spec["volumes"])
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] > 0


def test_logins_come_from_a_secret_alone(tmp_path: Path) -> None:
    made = pod(context(tmp_path), "config.json", "registries.conf")
    env = {entry["name"]: entry["value"] for entry in made["spec"]["containers"][0]["env"]}
    assert env["REGISTRY_AUTH_FILE"].endswith("/config.json")
    assert env["CERTIFICATES"] == ""
    secrets = [volume["secret"]["secretName"] for volume in made["spec"]["volumes"] if "secret" in volume]
    assert secrets == [made["metadata"]["name"]] == [made["spec"]["imagePullSecrets"][0]["name"]]


def test_its_own_authority_is_given_to_buildah(tmp_path: Path) -> None:
    container = pod(context(tmp_path), "ca.crt")["spec"]["containers"][0]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["CERTIFICATES"] == container["volumeMounts"][1]["mountPath"]
    assert container["command"][2].count('--cert-dir "$CERTIFICATES"') == 2


@pytest.mark.parametrize("stage", ["helper", "train"])
def test_a_tag_tells_what_it_is_made_from(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_text("a")
    before = recipe(context(tmp_path, context=str(tmp_path)), stage)
    base = before.bases[0]
    tags = {before.tag({base: "sha256:1"}), before.tag({base: "sha256:2"})}
    tags.add(recipe(context(tmp_path), stage).tag({base: "sha256:1"}))
    (tmp_path / "wheels" / "a.whl").write_text("b")
    tags.add(recipe(context(tmp_path, context=str(tmp_path)), stage).tag({base: "sha256:1"}))
    other = context(tmp_path, context=str(tmp_path), build_args={"BASE_IMAGE": "debian:13"})
    tags.add(recipe(other, stage).tag({}))
    assert len(tags) == 5
    assert all(tag.startswith(f"{stage}-") for tag in tags)


def test_arguments_of_the_other_stage_are_no_reason_to_build_anew(tmp_path: Path) -> None:
    one = recipe(context(tmp_path), "helper").tag({})
    assert recipe(context(tmp_path, build_args={"TORCH": "2.8.0"}), "helper").tag({}) == one
