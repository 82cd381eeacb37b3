"""The trigger form: what it shows of a run's schema, what it refuses, and the way back."""

from typing import Any

import pytest
from airflow.sdk import Param

from manycpu.operators.airflow_versions import ParamValidationError
from manycpu.operators.params import read_params, training_params
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local
from manycpu.pipeline.spec.training_run import Resources, TrainingRun
from manycpu.pipeline.spec.validation import read_run, read_target


@pytest.fixture(scope="module")
def form() -> dict[str, Param]:
    return training_params()


def read(params: dict[str, Any]) -> tuple[TrainingRun, Any]:
    run, target = read_params(params, training_params(), "manual__1", "1a2b3c4d5e")
    return read_run(run), read_target(target)


def filled(form: dict[str, Param], **values: object) -> dict[str, Any]:
    """Submit the form with what it holds at first, and some values."""
    return {name: param.value for name, param in form.items()} | values


def test_every_field_is_there_with_a_section_and_a_help_text(form: dict[str, Param]) -> None:
    run = set(TrainingRun.model_fields) - {"resources"} | {
        f"resources_{name}" for name in Resources.model_fields
    }
    targets = {
        f"{kind}_{name}"
        for kind, model in (("local", Local), ("baremetal", BareMetal), ("kubernetes", Kubernetes))
        for name in model.model_fields
        if name != "kind"
    }
    assert set(form) == run | targets | {"target_kind"}
    assert all(param.schema.get("section") and param.description for param in form.values())


def test_drop_downs_bounds_and_examples(form: dict[str, Param]) -> None:
    assert form["backend"].schema["enum"] == ["ccl", "gloo", "mpi", None]
    assert form["target_kind"].schema["enum"] == ["local", "baremetal", "kubernetes"]
    assert (form["nproc_per_node"].schema["minimum"], form["nproc_per_node"].schema["maximum"]) == (1, 1024)
    assert "Seconds" in str(form["run_timeout"].description)
    assert "For example: question_answering, ./train.py" in str(form["program"].description)
    assert form["args"].schema["format"] == "multiline"


def test_only_the_program_has_to_be_given(form: dict[str, Param]) -> None:
    empty = [name for name, param in form.items() if not param.has_value]
    assert [name for name in empty if "null" not in form[name].schema["type"]] == ["program"]
    run, target = read(filled(form, program="./train.py"))
    assert run == TrainingRun(program="./train.py", output=run.output)
    assert str(run.output).endswith("/models/manual-1-1a2b3c4d5e")
    assert target == Local()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "nccl"),
        ("nproc_per_node", 0),
        ("nproc_per_node", "two"),
        ("job_name", "Not A Name"),
        ("target_kind", "moon"),
        ("program", None),
    ],
)
def test_the_form_refuses(form: dict[str, Param], name: str, value: object) -> None:
    with pytest.raises(ParamValidationError):
        form[name].resolve(value)


def test_every_first_value_passes_its_own_schema(form: dict[str, Param]) -> None:
    for param in form.values():
        if param.has_value:
            param.resolve()


def test_the_way_back(form: dict[str, Param]) -> None:
    run, target = read(
        filled(
            form,
            program="-m mypackage.train",
            args="--data {data} --name 'two words'",
            nnodes="1:4",
            resources_cpu=4,
            env={"A": "b"},
            env_from=["hub-token"],
            target_kind="baremetal",
            baremetal_hostfile="./hosts",
            baremetal_ssh="ssh -p 2222",
            local_launch="mpirun",
        )
    )
    assert run.args == ("--data", "{data}", "--name", "two words")
    assert (run.nodes, run.resources.cpu, run.env, run.env_from) == ((1, 4), 4, {"A": "b"}, ("hub-token",))
    assert target == BareMetal(hostfile="./hosts", ssh=("ssh", "-p", "2222"))


def test_what_starts_the_ranks_stays_open_where_it_was_not_touched(form: dict[str, Param]) -> None:
    _, target = read(filled(form, program="x.py", max_restarts=2))
    assert "launch" not in target.model_fields_set


def test_the_way_back_to_kubernetes(form: dict[str, Param]) -> None:
    toleration = {"key": "training", "operator": "Exists"}
    given = {
        "kubernetes_launch": "mpijob",
        "kubernetes_namespace": "ml",
        "kubernetes_claim": "training-data",
        "kubernetes_node_selector": {"pool": "training"},
        "kubernetes_tolerations": [toleration],
        "kubernetes_pull_policy": "Always",
    }
    for name, value in given.items():
        form[name].resolve(value)
    _, target = read(filled(form, program="x.py", target_kind="kubernetes", **given))
    assert target == Kubernetes(
        launch="mpijob",
        namespace="ml",
        claim="training-data",
        node_selector={"pool": "training"},
        tolerations=(toleration,),
        pull_policy="Always",
    )


def test_what_is_left_open_passes_its_own_schema(form: dict[str, Param]) -> None:
    for param in form.values():
        if "null" in param.schema["type"]:
            param.resolve(None)


def test_a_targets_fields_are_in_parts(form: dict[str, Param]) -> None:
    sections = {
        str(form[f"kubernetes_{name}"].schema["section"])
        for name in Kubernetes.model_fields
        if name != "kind"
    }
    parts = {f"Target: kubernetes{part}" for part in ("", ", volume", ", image", ", nodes")}
    assert sections == parts
    assert form["kubernetes_tolerations"].schema["items"]["type"] == "object"
    assert "items" not in form["env_from"].schema


def test_lists_are_taken_as_lists_over_the_api(form: dict[str, Param]) -> None:
    assert form["args"].resolve(["--a", "b c"]) == ["--a", "b c"]
    assert read(filled(form, program="x.py", args=["--a", "b c"]))[0].args == ("--a", "b c")


def test_an_unknown_parameter_is_refused_by_name(form: dict[str, Param]) -> None:
    with pytest.raises(BadInputError, match=r"params\.nproc_per_nod: .*Did you mean 'nproc_per_node'"):
        read(filled(form, program="x.py", nproc_per_nod=2))


def test_defaults_of_ones_own() -> None:
    form = training_params({"program": "question_answering", "nproc_per_node": 2})
    assert (form["program"].value, form["nproc_per_node"].value) == ("question_answering", 2)


def test_an_unknown_default_is_refused_when_the_dag_file_is_read() -> None:
    with pytest.raises(BadInputError, match=r"params\.resources: .*Did you mean 'resources_cpu'") as raised:
        training_params({"program": "x.py", "nproc_per_nodes": 8, "resources": {"cpu": 4}})
    assert "Did you mean 'nproc_per_node'" in str(raised.value)
