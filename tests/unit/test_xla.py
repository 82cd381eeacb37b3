"""Device xla, as far as it is decided without torch: refusals, times, warnings, and advice on models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.golden import differences, golden
from support.job_manifests import container, objects, place, pod, run, target, variables

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.functions.pickled import advice_on_source
from manycpu.pipeline.launchers import device_refusals
from manycpu.pipeline.launchers.environment import environment
from manycpu.pipeline.launchers.pod_spec import TPU_LABELS
from manycpu.pipeline.node import accelerate_world, metrics
from manycpu.pipeline.node.world import read_requested
from manycpu.pipeline.node.xla import Compiled, Devices, Steps
from manycpu.pipeline.observed import observe
from manycpu.pipeline.spec.event_types import MetricsEvent, decode
from manycpu.pipeline.spec.events import encode
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import Local, Target
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.validation import read_run
from manycpu.pipeline.targets.machines.context import is_on_machines
from manycpu.pipeline.targets.machines.preflight import findings
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.outcome import outcome

OUTPUT = {"program": "./train.py", "output": "./out"}
TPUS = {"node_selector": TPU_LABELS}


# scale


@pytest.mark.parametrize(("fields", "devices"), [({}, 8), ({"nproc_per_node": 4}, 4)])
def test_one_process_drives_all_devices_and_there_are_eight_unless_said(
    fields: dict[str, Any], devices: int
) -> None:
    asked = read_run({**OUTPUT, "device": "xla", **fields})
    assert (asked.nproc_per_node, asked.processes) == (devices, 1)
    on_cpus = read_run({**OUTPUT, **fields})
    assert on_cpus.processes == on_cpus.nproc_per_node == fields.get("nproc_per_node", 1)


def test_a_machine_with_fewer_cores_than_devices_is_enough(tmp_path: Any) -> None:
    ctx = open_context({**OUTPUT, "device": "xla", "nproc_per_node": 1000}, None, "test", base=tmp_path)
    assert is_on_machines(ctx)
    assert ctx.run.nproc_per_node == 1000
    assert [found.field for found in findings(ctx) if found.fatal] == ["run.device"]  # no torch_xla here


def test_a_rank_is_told_its_devices_and_no_backend() -> None:
    told = environment(run(device="xla", nproc_per_node=4, dtype="bf16", downcast_bf16=True), place())
    world = read_requested(told)
    assert (world.devices, world.processes, world.backend) == (4, 1, None)
    assert told["ACCELERATE_DOWNCAST_BF16"] == "true"
    assert read_requested(environment(run(), place())).devices is None


def proof(**fields: object) -> str:
    return encode("proof", rank=0, world_size=1, host="a", meeting="m", **fields)


@pytest.mark.parametrize(
    ("fields", "state"),
    [({"devices": 8}, RunState.SUCCEEDED), ({"devices": 4}, RunState.FAILED), ({}, RunState.FAILED)],
)
def test_a_success_needs_the_devices_that_were_asked_for(
    tmp_path: Any, fields: dict[str, int], state: RunState
) -> None:
    ctx = open_context({**OUTPUT, "device": "xla"}, None, "test", base=tmp_path)
    ended = encode("exit", rank=0, code=0, host="a")
    judged = outcome(ctx, Status(state=RunState.SUCCEEDED), observe([proof(**fields), ended]))
    assert judged.state is state


# refusals


@pytest.mark.parametrize(
    ("fields", "where", "field"),
    [
        ({"backend": "gloo"}, Local(), "run.backend"),
        ({"nnodes": 2}, Local(), "run.nnodes"),
        ({"nnodes": "1:2"}, Local(), "run.nnodes"),
        ({"program": "question_answering"}, Local(), "run.program"),
        ({"dtype": "fp32", "downcast_bf16": True}, Local(), "run.downcast_bf16"),
        ({"device": "cpu", "dtype": "bf16", "downcast_bf16": True}, Local(), "run.downcast_bf16"),
        ({}, target(), "target.node_selector"),
        ({}, target(node_selector={next(iter(TPU_LABELS)): "tpu-v4-podslice"}), "target.node_selector"),
    ],
)
def test_what_device_xla_cannot_have_is_refused(fields: dict[str, Any], where: Target, field: str) -> None:
    asked = TrainingRun(**{**OUTPUT, "device": "xla", **fields})
    (found,) = device_refusals(asked, where)
    assert (found.field, found.fatal) == (field, True)


@pytest.mark.parametrize("where", [Local(), target(node_selector=TPU_LABELS)])
def test_what_device_xla_can_have_is_not_refused(where: Target) -> None:
    asked = TrainingRun(**OUTPUT, device="xla", dtype="bf16", downcast_bf16=True, max_restarts=1)
    assert list(device_refusals(asked, where)) == []
    assert list(device_refusals(TrainingRun(**OUTPUT, backend="ccl", nnodes=2), target())) == []


# on Kubernetes


@pytest.mark.parametrize("launch", ["pytorchjob", "mpijob"])
def test_golden_differences_of_a_run_on_tpus(launch: str) -> None:
    fields = {"nnodes": 1, "nproc_per_node": 8}
    on_cpus, on_tpus = (
        as_yaml(*objects(launch, on, **fields, **more)) for on, more in (({}, {}), (TPUS, {"device": "xla"}))
    )
    other = differences(on_cpus, on_tpus)
    assert other == golden(f"{launch}-tpu.diff", other)


@pytest.mark.parametrize("launch", ["pytorchjob", "mpijob"])
def test_ranks_ask_for_tpus_and_launchers_do_not(launch: str) -> None:
    on = {"node_selector": {"pool": "a", **TPU_LABELS}}
    written = objects(launch, on, device="xla", nnodes=1, nproc_per_node=4, resources={})
    asked = {"google.com/tpu": "4"}
    assert container(written)["resources"] == {"requests": asked, "limits": asked}
    assert variables(written)["PJRT_DEVICE"] == "TPU"
    assert pod(written)["nodeSelector"] == {"pool": "a", **TPU_LABELS}
    if launch == "mpijob":
        assert container(written, "launcher")["resources"] == {}
        assert pod(written, "launcher")["nodeSelector"] == {"pool": "a"}


# the environment of libraries


def test_libraries_are_told_of_the_devices_before_they_are_imported() -> None:
    environ = {"MANYCPU_DTYPE": "bf16", "TF_CPP_MIN_LOG_LEVEL": "0"}
    accelerate_world.prepare_devices(environ, 4)
    assert environ["CPU_NUM_DEVICES"] == "4"
    assert environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environ["TF_CPP_MIN_LOG_LEVEL"] == "0"  # the user's


@pytest.mark.parametrize(
    ("installed", "environ", "told"),
    [(True, {"MANYCPU_RUN": "a"}, True), (False, {"MANYCPU_RUN": "a"}, False), (True, {}, False)],
)
def test_accelerate_keeps_to_cpus_where_xla_is_installed_and_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, installed: bool, environ: dict[str, str], told: bool
) -> None:
    monkeypatch.setattr(accelerate_world, "find_spec", lambda _: object() if installed else None)
    accelerate_world.prepare_devices(environ, None)
    assert (environ.get("USE_TORCH_XLA") == "false") is told


# times of steps


class Machine:
    """A clock and a compiler, which a test turns on."""

    def __init__(self) -> None:
        self.now, self.compiled = 0.0, Compiled(0, 0.0)
        self.steps = Steps(lambda: self.compiled, lambda: self.now)

    def step(self, *shapes: Sequence[int], seconds: float, compilations: int = 0) -> None:
        self.steps.begins(shapes)
        self.now += seconds
        self.compiled = Compiled(
            self.compiled.number + compilations, self.compiled.seconds + 0.9 * seconds * bool(compilations)
        )


def said(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    lines = [json.loads(line.partition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    return [(event["event"], event["message"]) for event in lines]


def test_steps_that_compile_are_told_apart_from_those_that_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    machine.step((16, 4), (16,), seconds=10, compilations=2)
    machine.step((16, 4), (16,), seconds=5, compilations=1)
    for _ in range(4):
        machine.step((16, 4), (16,), seconds=0.5)
    assert machine.steps.metrics() == {
        "xla_compilations": 3,
        "xla_compile_seconds": 13.5,
        "xla_first_step_seconds": 10,
        "xla_later_step_seconds": 0.5,
    }
    message = "the first 2 steps were slow: XLA compiled (3 compilations, 13.5 s); a step takes 0.500 s now"
    assert said(capsys) == [("start", message)]


def test_what_is_between_two_loaders_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    machine.step((4,), seconds=1)
    machine.steps.ends()
    machine.now += 100
    machine.steps.ends()
    machine.step((4,), seconds=3)
    assert machine.steps.metrics()["xla_later_step_seconds"] == 2
    assert said(capsys) == []  # nothing was compiled, so nothing was slow


def test_a_batch_of_another_size_is_warned_of_once_where_it_compiles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine()
    machine.step((16, 4), (16,), seconds=10, compilations=2)
    machine.step((16, 4), (16,), seconds=1)
    machine.step((16, 4), (16,), seconds=2, compilations=1)  # the model as it evaluates: no other size
    for _ in range(2):
        machine.step((5, 4), (5,), seconds=4, compilations=1)
    machine.step((7, 4), (7,), seconds=1)  # compiled before
    machine.steps.ends()
    (_, (event, message)) = said(capsys)
    assert event == "warning"
    assert message.startswith(
        "a batch of another size made XLA compile again (1 compilation, 3.6 s): its tensors are 5x4 and 5, "
        "and those of the first batch 16x4 and 16."
    )


def test_a_program_without_batches_has_compilations_alone() -> None:
    assert Machine().steps.metrics() == {"xla_compilations": 0, "xla_compile_seconds": 0.0}


def test_times_of_xla_hide_no_files_of_the_trainer_and_write_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCPU_RUN", "xla-0123456789")
    monkeypatch.setenv("MANYCPU_OUTPUT", str(tmp_path))
    monkeypatch.setattr(metrics, "_REPORTED", set())
    (tmp_path / "all_results.json").write_text('{"eval_f1": 91.0}')
    Devices(8, Machine().steps).report()
    metrics.report_trainer_files()
    events = map(decode, capsys.readouterr().out.splitlines())
    reported = [event.values for event in events if isinstance(event, MetricsEvent)]
    assert reported == [{"xla_compilations": 0, "xla_compile_seconds": 0.0}, {"eval_f1": 91.0}]
    assert [path.name for path in tmp_path.iterdir()] == ["all_results.json"]


# a model that is built inside


@pytest.mark.parametrize(
    "line",
    [
        "model = AutoModel.from_pretrained('bert')",
        "model = transformers.AutoModelForCausalLM.from_config(config)",
        "model = BertForSequenceClassification(config)",
        "model = timm.create_model('resnet50')",
        "model = nn.Sequential(nn.Linear(2, 2))",
        "model = Net()",
        "model = Net().to(device)",
    ],
)
def test_a_model_that_is_built_inside_is_named(line: str) -> None:
    advice = advice_on_source(f"    def train(lr):\n        {line}\n", ["Net"])
    assert advice is not None
    assert "builds its model inside (" in advice
    assert line.removeprefix("model = ").partition("(")[0] in advice


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer = AutoTokenizer.from_pretrained('bert')",
        "collate = DataCollatorForLanguageModeling(tokenizer)",
        "config = AutoConfig.from_pretrained('bert')",
        "model = accelerator.prepare(model)",
        "loss = model(**batch).loss",
        "scores = torch.nn.functional.softmax(logits)",
        "model = accelerator.unwrap_model(model)",
        "%time model.train()",
    ],
)
def test_other_calls_are_taken_for_no_model(line: str) -> None:
    assert advice_on_source(f"def train(model):\n    {line}\n") is None


def test_a_class_of_modules_in_the_same_source_is_a_model() -> None:
    source = "class Net(torch.nn.Module): pass\ndef train():\n    return Net()\n"
    assert "(Net)" in str(advice_on_source(source))
