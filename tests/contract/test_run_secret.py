"""Variables with secrets, by name or in a URL, are in a Secret of the run's, and in no manifest."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_api_server import ApiServer
from support.job_manifests import container, objects

from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes import preflight, run_secret
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.volume import helper_pod
from manycpu.pipeline.targets.open_run import open_context, reopen

SECRETS = {"HF_TOKEN": "hunter2$(HOME)", "HTTPS_PROXY": "http://me:hunter2@proxy.test:3128"}
ENV = {**SECRETS, "LANG": "C"}


def opened(server: ApiServer, folder: Path, env: dict[str, str]) -> ClusterContext:
    run = {"program": "question_answering", "output": str(folder / "out"), "env": env}
    target = {"kind": "kubernetes", "namespace": "ml", "helper_image": "r/helper:1"}
    ctx = open_context(run, target, "a", base=folder, access=Access(connect=server.connect))
    assert is_on_kubernetes(ctx)
    return ctx


def provided(server: ApiServer, folder: Path) -> ClusterContext:
    """Begin a run, with the secrets of its environment in its Secret."""
    ctx = opened(server, folder, ENV)
    ctx.ledger.open(ctx.new_entry(0))
    run_secret.provide(ctx)
    return ctx


def kept(server: ApiServer) -> dict[str, str]:
    return {
        name: base64.b64decode(value).decode()
        for secret in server.objects.get("Secret", [])
        for name, value in secret["data"].items()
    }


@pytest.mark.parametrize("launch", [*JOB_KINDS])
def test_no_manifest_holds_the_value(launch: str) -> None:
    of_mpi = {"mpi": "openmpi"} if launch == "trainjob" else {}
    for on in ({}, of_mpi):
        written = objects(launch, on, env=ENV)
        assert "hunter2" not in json.dumps(written)
        variables = {entry["name"]: entry for entry in container(written)["env"]}
        for name in SECRETS:
            ref = {"secretKeyRef": {"name": "train-0123456789-env", "key": name}}
            assert variables[name] == {"name": name, "valueFrom": ref}
        assert variables["LANG"]["value"] == "C"


def test_the_secret_goes_with_the_ledger_and_holds_what_the_run_says_now(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = provided(server, tmp_path)
    assert kept(server) == SECRETS
    edited = opened(server, tmp_path, {"HF_TOKEN": "other"})
    run_secret.provide(edited)
    assert kept(server) == {"HF_TOKEN": "other"}
    run_secret.provide(edited)
    assert server.created.count(f"Secret/{ctx.name}-env") == 2
    server.remove("ConfigMap", ctx.name)
    assert kept(server) == {}


def test_a_secret_of_its_name_that_a_person_made_is_refused_and_stays(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = opened(server, tmp_path, ENV)
    ctx.ledger.open(ctx.new_entry(0))
    server.put("Secret", {"metadata": {"name": f"{ctx.name}-env"}, "data": {"MINE": "MQ=="}})
    with pytest.raises(ClusterError, match=f"there is a Secret ml/{ctx.name}-env that is not") as raised:
        run_secret.provide(ctx)
    assert f"kubectl -n ml delete secret {ctx.name}-env" in (raised.value.fix or "")
    (finding,) = preflight._run_check(preflight._check_secrets, ctx)  # noqa: SLF001 - one of many checks
    assert (finding.message, finding.fatal) == (raised.value.message, True)
    run_secret.remove(ctx)
    assert kept(server) == {"MINE": "1"}


def test_the_secret_of_an_earlier_ledger_is_not_used_even_with_the_same_values(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes deletes it at any moment, as its owner is gone."""
    monkeypatch.setattr(run_secret, "_DELETION_TIMEOUT_S", 0.0)
    ctx = provided(server, tmp_path)
    (secret,) = server.objects["Secret"]
    owners = [owner | {"uid": "an earlier ledger"} for owner in ctx.ledger.owner()]
    server.put("Secret", secret | {"metadata": secret["metadata"] | {"ownerReferences": owners}})
    with pytest.raises(ClusterError, match="does not go"):
        run_secret.provide(ctx)
    run_secret.remove(ctx)
    assert kept(server) == SECRETS
    server.remove("Secret", f"{ctx.name}-env")
    run_secret.provide(ctx)
    assert server.objects["Secret"][0]["metadata"]["ownerReferences"] == ctx.ledger.owner()


def test_a_run_that_is_opened_from_its_ledger_takes_the_value_from_the_secret(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = provided(server, tmp_path)
    again: Any = reopen(ctx.ledger.read(), access=ctx.access)
    assert "hunter2" not in json.dumps(server.objects["ConfigMap"])
    run_secret.provide(again)
    assert kept(server) == SECRETS
    for each in (ctx, again):
        pod = helper_pod.manifest(each, "export", None, "r/helper:1", [])
        variables = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
        for name in SECRETS:
            assert variables[name]["valueFrom"]["secretKeyRef"]["name"] == f"{ctx.name}-env"
        assert variables["LANG"]["value"] == "C"
        assert "***" not in json.dumps(pod)
        assert "hunter2" not in json.dumps(pod)
