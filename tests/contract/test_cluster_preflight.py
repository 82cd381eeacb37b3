"""What preflight says of a run for a cluster that cannot be reached."""

import json
from pathlib import Path

import pytest
from support.recipe_checks import check_here

from manycpu.pipeline.adapters import storage
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import is_on_kubernetes
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.preflight import preflight as check


def test_what_does_not_go_together_is_told_without_the_cluster(tmp_path: Path) -> None:
    run = {"program": "question_answering", "output": str(tmp_path / "out")}
    queue = {"launch": "trainjob", "runtime": "mine", "queue": "team-a"}
    target = {"kind": "kubernetes", "namespace": "ml", "connection": str(tmp_path / "none"), **queue}
    ctx = open_context(run, target, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    found = {one.field: one.message for one in preflight.findings(ctx)}
    assert "no cluster can be reached" in found["target.connection"]
    assert "in a queue the runtime is made for the run" in found["target.runtime"]


def test_a_model_that_its_pods_cannot_hold_is_refused_with_the_pods_that_would(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 16_384, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "num_attention_heads": 32, "attention_dropout": 0.0, **sizes})
    )
    step = "--per_device_train_batch_size 1 --gradient_checkpointing"
    fields = {"program": "question_answering", "output": None, "model": str(tmp_path)}
    target = {"kind": "kubernetes", "connection": str(tmp_path / "none")}
    found = {}
    for memory, nodes, option in (("24Gi", 1, ""), ("24Gi", 16, " --shard full"), ("256Gi", 1, "")):
        run = fields | {"resources": {"cpu": 8, "memory": memory}, "nnodes": nodes, "args": step + option}
        ctx = open_context(run, target, "test", base=tmp_path)
        assert is_on_kubernetes(ctx)
        found[memory, nodes] = {one.field: one for one in preflight.findings(ctx)}
    refused = found["24Gi", 1]["run.nnodes"]
    assert refused.fatal
    assert "its pod has 24 GiB" in refused.message
    assert refused.fix.startswith("Set run.nnodes to "), "it shards by itself"
    assert "run.nnodes" not in found["24Gi", 16]
    assert "run.nnodes" not in found["256Gi", 1]


@pytest.mark.parametrize(
    ("checkpoints", "target", "fatal"),
    [
        ("./qa", {}, []),
        ("/volume", {}, []),
        ("/volume/qa", {"mount_path": "/shared/../volume"}, []),
        ("/checkpoints/qa", {}, [True]),
        ("../qa", {}, [True]),
        ("/volumes/qa", {}, [True]),
        ("/checkpoints/qa", {"launch": "trainjob", "runtime": "own"}, [True]),
        ("/checkpoints/qa", {"launch": "trainjob", "runtime": "of-the-cluster"}, [False]),
    ],
)
def test_checkpoints_on_the_own_disk_of_a_pod_are_refused(
    tmp_path: Path, checkpoints: str, target: dict[str, str], fatal: list[bool]
) -> None:
    (tmp_path / "train.py").touch()
    run = {"program": "train.py", "output": str(tmp_path / "out"), "checkpoints": checkpoints}
    cluster = {
        "kind": "kubernetes",
        "connection": str(tmp_path / "none"),
        "image": "registry.example/train:1",
    }
    fields = {**cluster, "claim": "data", "mount_path": "/volume", **target}
    found = check(open_context(run, fields, "test", base=tmp_path))
    assert [each.fatal for each in found if each.field == "run.checkpoints"] == fatal


def test_a_login_that_pods_do_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "login_options", lambda *_: {})
    run = {"program": "hogwild", "data": "s3://storage@sets/digits", "output": "s3://models/digits"}
    target = {"kind": "kubernetes", "connection": str(tmp_path / "none")}
    found = [each for each in check(open_context(run, target, "test", base=tmp_path)) if each.fatal]
    said = {each.field: each.message for each in found}
    assert said["run.data"] == "s3://storage@sets/digits names a login, and pods have none"
    assert "run.output" not in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"data": "s33://sets/texts"},
            "run.data: 's33://sets/texts' cannot be opened: Protocol not known",
        ),
        ({"data": "s3:///texts"}, "run.data: 's3:///texts' names no bucket"),
        ({"output": "s3://?x/out"}, "run.output: 's3://?x/out' names no bucket"),
        ({"output": "s3://models//qa"}, "run.output: s3://models//qa has '//', '.' or '..' in its path"),
        ({"output": "s3://models/./qa"}, "run.output: s3://models/./qa has '//', '.' or '..' in its path"),
        (
            {"output": "s3://models/qa?versionId=3"},
            "run.output: s3://models/qa?versionId=*** names",
        ),
    ],
)
def test_the_form_of_urls_that_only_pods_open_is_checked(
    tmp_path: Path, fields: dict[str, str], said: str
) -> None:
    run = {"program": str(tmp_path), "output": "s3://models/qa", **fields}
    target = {"kind": "kubernetes", "connection": str(tmp_path / "none")}
    found = check(open_context(run, target, "test", base=tmp_path))
    urls = [str(one) for one in found if one.field in ("run.data", "run.output")]
    assert urls[0].startswith(said)


@pytest.mark.parametrize(
    ("program", "args", "said"),
    [
        ("question_answering", "--num_train_epoch 1", "Did you mean '--num_train_epochs'?"),
        ("image_classification", "--lr 0", "must be greater than 0"),
        ("causal_lm", "--lora_r 8 --max_steps 3 --dataset_name org/texts", ""),
    ],
)
def test_options_that_a_recipe_refuses_are_found_before_anything_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, args: str, said: str
) -> None:
    if program == "image_classification":  # the recipe that is imported soonest: in a process, as it is
        # A recipe's check is left out when it takes longer, as on a busy machine.
        monkeypatch.setattr("manycpu.pipeline.verbs.preflight._PARSER_TIMEOUT_S", 600.0)
    else:
        check_here(monkeypatch)
    run = {"program": program, "args": args, "model": "hf://org/model", "output": "s3://models/one"}
    target = {"kind": "kubernetes", "connection": str(tmp_path / "none")}
    found = [each for each in check(open_context(run, target, "test", base=tmp_path)) if each.fatal]
    told = "\n".join(each.message for each in found if each.field == "run.args")
    assert (said in told) if said else not told
