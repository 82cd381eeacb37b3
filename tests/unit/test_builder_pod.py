"""The builder's pod: what it runs, what it is given, and that its Pod Security level takes it."""

import errno
import io
import json
import os
import shutil
import subprocess
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.golden import as_json, golden

from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.spec.naming import run_name
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.image.base_image import plan
from manycpu.pipeline.targets.kubernetes.image.build_inputs import OWN, Build, Recipe, Stage, recipe
from manycpu.pipeline.targets.kubernetes.image.builder_pod import manifest
from manycpu.pipeline.targets.kubernetes.image.builders import PODS, access
from manycpu.pipeline.targets.kubernetes.image.layers import tree
from manycpu.pipeline.targets.kubernetes.image.registries import plain_hosts, registries
from manycpu.pipeline.targets.open_run import open_context


def context(folder: Path, **target: Any) -> ClusterContext:
    """Describe a run."""
    run = {"program": "question_answering", "output": str(folder / "out")}
    made = open_context(run, {"kind": "kubernetes", "namespace": "ml", **target}, "test", base=folder)
    assert is_on_kubernetes(made)
    return made


def pod(ctx: ClusterContext, stage: Stage = "train", ledger: str | None = None) -> dict[str, Any]:
    """Make the builder's pod of the run with this ledger, or of a dry run."""
    wanted = Build(recipe(ctx, stage), Reference("a.test", "ml/manycpu", "train-1"))
    return manifest(ctx, wanted, "a.test/builder@sha256:1", [{"uid": ledger}] if ledger else [])


@pytest.mark.parametrize("builder", PODS)
def test_the_pod_is_as_agreed(builder: str) -> None:
    arguments = {"TORCH": "2.8.0", "HELPER_REQUIREMENTS": "s3fs", "PACKAGES": "$(HOME)"}
    ctx = context(Path("/"), builder=builder, build_args=arguments, node_selector={"pool": "cpu"})
    text = as_json(pod(ctx))
    assert text == golden(f"builder-{builder}.json", text)


def test_pod_security_baseline_takes_it(tmp_path: Path) -> None:
    spec = pod(context(tmp_path))["spec"]
    (container,) = spec["containers"]
    assert set(container["securityContext"]) == {"runAsUser", "runAsGroup"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec)
    assert all(set(volume) <= {"name", "emptyDir", "secret"} for volume in spec["volumes"])
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] > 0


def test_buildkits_pod_goes_beyond_baseline_by_two_profiles_alone(tmp_path: Path) -> None:
    spec = pod(context(tmp_path, builder="buildkit"))["spec"]
    (container,) = spec["containers"]
    unconfined = {"type": "Unconfined"}
    assert container["securityContext"] == {
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": unconfined,
        "appArmorProfile": unconfined,
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers", "securityContext"} & set(spec)
    assert all(set(volume) <= {"name", "emptyDir", "secret"} for volume in spec["volumes"])


def test_buildkit_is_told_how_to_ask_each_registry() -> None:
    (text,) = PODS["buildkit"].settings(["10.0.0.1:5000"], ["a.test", "b.test:443"]).values()
    trusting = {"http": False, "ca": ["/run/manycpu/ca.crt"]}
    known = {"10.0.0.1:5000": {"http": True}, "a.test": trusting, "b.test:443": trusting}
    assert tomllib.loads(text) == {"registry": known}


def test_plain_http_is_for_registries_that_the_target_writes_so(tmp_path: Path) -> None:
    ctx = context(
        tmp_path, registry="10.0.0.1:5000/ml", image="http://10.0.0.2:5000/base", helper_image="a/b"
    )
    assert plain_hosts(ctx) == {"10.0.0.2:5000"}
    assert plain_hosts(context(tmp_path, registry="http://10.0.0.1:5000/ml")) == {"10.0.0.1:5000"}
    assert plain_hosts(context(tmp_path, registry="localhost:5000/ml")) == set()


def test_logins_come_from_a_secret_alone(tmp_path: Path) -> None:
    made = pod(context(tmp_path))
    env = {entry["name"]: entry["value"] for entry in made["spec"]["containers"][0]["env"]}
    assert env["REGISTRY_AUTH_FILE"].endswith("/config.json")
    secrets = [volume["secret"]["secretName"] for volume in made["spec"]["volumes"] if "secret" in volume]
    assert secrets == [made["metadata"]["name"]] == [made["spec"]["imagePullSecrets"][0]["name"]]


def test_runs_of_one_name_in_two_namespaces_build_beside_each_other_in_a_third(tmp_path: Path) -> None:
    metadata = [
        pod(context(tmp_path, namespace=team, build_namespace="builds"), "helper", uid)["metadata"]
        for team, uid in {
            "team-a": "1b4e28ba-2fa1-4d2e-883f-0016d3cca427",
            "team-b": "6fa459ea-ee8a-4ca4-894e-db77e160355e",
        }.items()
    ]
    assert len({item["name"] for item in metadata}) == 2
    assert len({item["labels"]["manycpu/run"] for item in metadata}) == 2
    assert all("ownerReferences" not in item for item in metadata)


def test_the_longest_name_of_a_pod_is_one_for_its_host_too(tmp_path: Path) -> None:
    long = replace(context(tmp_path), name=run_name("question" * 9, "0123456789"))
    name = pod(long, "helper", "1b4e28ba-2fa1-4d2e-883f-0016d3cca427")["metadata"]["name"]
    assert len(name) <= 63


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


def test_what_dockerignore_names_is_no_input_of_an_image(tmp_path: Path) -> None:
    def inputs(dockerfile: str) -> Recipe:
        return recipe(context(tmp_path, dockerfile=str(tmp_path / dockerfile)), "train")

    (tmp_path / "runs").mkdir()
    for name in ("Dockerfile", "gpu.Dockerfile", "a.py", ".env", "runs/log"):
        (tmp_path / name).write_text("FROM scratch\nCOPY . /app\n")
    (tmp_path / ".dockerignore").write_text(".env\nruns\n*.Dockerfile\n")
    before = inputs("Dockerfile")
    assert [path for path, _ in before.files] == [".dockerignore", "Dockerfile", "a.py"]
    (tmp_path / "runs" / "log").write_text("more")
    assert inputs("Dockerfile").tag({}) == before.tag({})
    # A Dockerfile's own file counts instead; the build's folder has it by the name that builders read.
    (tmp_path / "gpu.Dockerfile.dockerignore").write_text("*\n!runs\n")
    (tmp_path / "Dockerfile.dockerignore").write_text("runs\n")
    with inputs("gpu.Dockerfile").folder() as folder:
        assert {path.name for path in folder.iterdir()} == {".dockerignore", "Dockerfile", "runs"}
        assert (folder / ".dockerignore").read_text() == "*\n!runs\n"


def test_a_run_in_the_context_is_no_input_of_an_image(tmp_path: Path) -> None:
    run = tmp_path / "mc" / "runs" / "train-0123456789"
    run.mkdir(parents=True)
    for file in (tmp_path / "Dockerfile", tmp_path / "mc" / "a.py", run / "owner", run / "ledger.json"):
        file.write_text("FROM scratch\n")
    ctx = context(tmp_path, dockerfile=str(tmp_path / "Dockerfile"))
    assert [path for path, _ in recipe(ctx, "train").files] == ["Dockerfile", "mc/a.py", "mc/runs/"]


def test_the_dockerignore_of_a_context_leaves_out_nothing_of_manycpus_own(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*.sh\n*.txt\n")
    for name in ("a.whl", "b.sh"):
        (tmp_path / name).touch()
    made = recipe(context(tmp_path, context=str(tmp_path)), "train")
    assert {path for path, _ in made.files} == {"a.whl", *(path.name for path in OWN.iterdir())}


def test_links_and_empty_folders_of_a_context_stay_what_they_are(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "context"
    for path in (outside, folder / "none" / "deep", folder / "ignored"):
        path.mkdir(parents=True)
    (outside / "file").write_text("secret")
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (folder / ".dockerignore").write_text("ignored\n")
    links = {"file": "Dockerfile", "folder": "../outside", "away": f"{outside}/file", "nowhere": "x"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    made = recipe(context(tmp_path, dockerfile=str(folder / "Dockerfile")), "train")
    tag = made.tag({})
    with made.folder() as copied:
        assert {path.name: str(path.readlink()) for path in copied.iterdir() if path.is_symlink()} == links
        assert (copied / "none" / "deep").is_dir()
        assert not (copied / "ignored").exists()
    packed = tree(((f"/opt/manycpu/{path}", file) for path, file in made.files), "x", None, keep_links=True)
    with tarfile.open(fileobj=io.BytesIO(packed.tar)) as tar:
        members = {member.name.removeprefix("opt/manycpu/"): member for member in tar}
    assert {name: item.linkname for name, item in members.items() if item.issym()} == links
    assert members["none/deep"].isdir()
    (folder / "file").unlink()
    (folder / "file").symlink_to("other")
    assert recipe(context(tmp_path, dockerfile=str(folder / "Dockerfile")), "train").tag({}) != tag


def test_a_name_of_the_context_may_be_any_bytes(tmp_path: Path) -> None:
    for name in (b"Dockerfile", b"caf\xe9.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("FROM scratch\n")
    made = recipe(context(tmp_path, dockerfile=str(tmp_path / "Dockerfile")), "train")
    assert made.tag({}).startswith("train-")
    assert len(tree(made.files, "context", None).tar) > 0


def test_a_folder_of_the_context_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scandir(path: Path) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BuildError, match=rf"^target\.context: folder {tmp_path} cannot be listed: Stale"):
        recipe(context(tmp_path, context=str(tmp_path)), "train")


def test_a_base_that_only_the_builder_can_name_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("ARG A\nFROM ${A:?needed}\n")
    (tmp_path / "config.json").write_text("{}")
    fields = {"registry": "a.test/ml", "registry_connection": str(tmp_path / "config.json")}
    ctx = context(tmp_path, dockerfile=str(tmp_path / "Dockerfile"), **fields)
    made = plan(ctx, "train", Reference("a.test", "ml/manycpu"))
    assert not made.from_registry
    with registries(ctx) as opened:
        assert json.loads(access(ctx, made, opened)["config.json"]) == {"auths": {}}
    wrong = context(tmp_path, build_args={"BASE_IMAGE": "A b"}, **fields)
    with pytest.raises(BadInputError, match=r"^target\.build_args: 'A b' is no image's name"):
        plan(wrong, "train", Reference("a.test", "ml/manycpu"))


def test_the_builder_gets_the_logins_of_images_that_files_are_copied_from(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch\nCOPY --from=tools.test/uv:1 /uv /bin/\nRUN a --from=/x --from=b/$Y\n"
    )
    hosts = ("tools.test", "other.test")
    auths = {host: Login("u", "p").as_config(host)["auths"][host] for host in hosts}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    ctx = context(
        tmp_path,
        dockerfile=str(tmp_path / "Dockerfile"),
        registry="a.test/ml",
        registry_connection=str(tmp_path / "config.json"),
    )
    with registries(ctx) as opened:
        files = access(ctx, Build(recipe(ctx, "train"), Reference("a.test", "ml/manycpu", "1")), opened)
    assert set(json.loads(files["config.json"])["auths"]) == {"tools.test"}


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="no Debian here")
def test_a_debian_package_is_installed_unless_its_version_is(tmp_path: Path) -> None:
    for name in ("dpkg-query", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    for name, script in {"apt-get": 'echo "$@" >>"$0.calls"', "rm": "", "getent": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    query = ["dpkg-query", "-W", "-f", "${Version}", "dpkg"]
    present = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    packages = f"grep dpkg={present} dpkg=0.1 absent"
    command = ["/bin/sh", str(OWN / "system.sh"), packages]
    subprocess.run(command, check=True, env={"PATH": str(tmp_path)}, stdout=subprocess.DEVNULL)
    assert (tmp_path / "apt-get.calls").read_text().endswith(" dpkg=0.1 absent\n")
    assert f"dpkg={present}" not in (tmp_path / "apt-get.calls").read_text()


def test_arguments_of_the_other_stage_are_no_reason_to_build_anew(tmp_path: Path) -> None:
    one = recipe(context(tmp_path), "helper").tag({})
    assert recipe(context(tmp_path, build_args={"TORCH": "2.8.0"}), "helper").tag({}) == one
