"""The words validate themselves, and say what to do."""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.runfile import parse_yaml
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local
from manycpu.pipeline.spec.training_run import Resources, TrainingRun
from manycpu.pipeline.spec.validation import PATTERN_HINTS, read_run, read_target
from manycpu.pipeline.targets.context import home
from manycpu.pipeline.targets.open_run import open_context

RUN = {"program": "./train.py", "output": "./out"}
MODELS = (TrainingRun, Local, BareMetal, Kubernetes)
EXPLAINED = {name: field for model in MODELS for name, field in model.model_fields.items()}


@pytest.mark.parametrize(
    ("given", "nodes", "elastic"),
    [(4, (4, 4), False), ("4", (4, 4), False), ("1:4", (1, 4), True), (" 2 : 3 ", (2, 3), True)],
)
def test_nnodes_is_a_count_or_a_range(given: object, nodes: tuple[int, int], elastic: bool) -> None:
    run = read_run({**RUN, "nnodes": given})
    assert (run.nodes, run.elastic) == (nodes, elastic)


@pytest.mark.parametrize("given", [0, -1, "x", "4:1", "0:2", "", "1:2:3", 1.5])
def test_other_nnodes_are_refused(given: object) -> None:
    with pytest.raises(BadInputError, match=r"^run\.nnodes: "):
        read_run({**RUN, "nnodes": given})


@pytest.mark.parametrize("given", ["", " "])
@pytest.mark.parametrize("field", ["data", "model", "output", "checkpoints", "resume_from"])
def test_an_empty_path_is_not_the_folder_that_paths_start_from(field: str, given: str) -> None:
    with pytest.raises(BadInputError, match=rf"^run\.{field}: "):
        read_run({**RUN, field: given})


@pytest.mark.parametrize("given", ["s3:/models/qa", "s3//models/qa", "s3:models/qa"])
@pytest.mark.parametrize("field", ["data", "model", "output", "checkpoints", "resume_from", "code"])
def test_a_mistyped_url_is_no_folder_of_its_name(field: str, given: str) -> None:
    with pytest.raises(BadInputError, match=rf"^run\.{field}: a URL begins with s3://, "):
        read_run({**RUN, field: given})
    assert getattr(read_run({**RUN, field: f"./{given}"}), field) == f"./{given}"


def test_protocols_of_fsspec_need_their_slashes() -> None:
    # data: has none, as in data:,x. Other packages may have added protocols.
    for protocol in [
        "abfs",
        "dir",
        "ftp",
        "gdrive",
        "gs",
        "hdfs",
        "hf",
        "local",
        "memory",
        "sftp",
        "simplecache",
    ]:
        assert protocol in fsspec.available_protocols()
        with pytest.raises(BadInputError, match=rf"^run\.output: a URL begins with {protocol}://, "):
            read_run({**RUN, "output": f"{protocol}:models/qa"})
    with pytest.raises(BadInputError, match=r"^run\.output: a URL begins with s3://, "):
        read_run({**RUN, "output": "dir://qa::s3:models"})


@pytest.mark.parametrize(
    "given", ["simplecache::s3://models/qa", "data//qa", "box//qa", "models:s3:x", "c:/qa"]
)
def test_a_path_or_a_chained_url_is_no_mistyped_url(given: str) -> None:
    assert read_run({**RUN, "output": given}).output == given


def test_args_may_be_written_as_a_shell_would_read_them() -> None:
    assert read_run({**RUN, "args": "--name 'a b' --n 2"}).args == ("--name", "a b", "--n", "2")


def test_numbers_in_args_and_env_become_text() -> None:
    run = read_run({**RUN, "args": ["--epochs", 2, "--lr", 3e-5], "env": {"CCL_WORKER_COUNT": 1}})
    assert run.args == ("--epochs", "2", "--lr", "3e-05")
    assert run.env == {"CCL_WORKER_COUNT": "1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nproc": 2}, "run.nproc: there is no such field. Did you mean 'nproc_per_node'?"),
        ({"backend": "nccl"}, "run.backend: Input should be 'ccl', 'gloo' or 'mpi'; given was 'nccl'"),
        ({"nproc_per_node": 0}, "run.nproc_per_node: Input should be greater than or equal to 1"),
        (
            {"resources": {"cores": 2}},
            "run.resources.cores: there is no such field. Choose one of: cpu, memory",
        ),
        (
            {"resources": {"memory": "8GB"}},
            "run.resources.memory: an amount is needed, such as 8Gi or 500M; given was '8GB'. Memory of each",
        ),
        (
            {"resources": {"cpu": "500m"}},
            "run.resources.cpu: a number is needed; given was '500m'. Write it in cores: 0.5",
        ),
        ({"resources": {"cpu": "some"}}, "run.resources.cpu: a number is needed; given was 'some'. Cores of"),
        ({"resources": 8}, "run.resources: a mapping is needed; given was 8. What each node gives"),
        ({"env_from": "hub"}, "run.env_from: a list is needed; given was 'hub'. Names of secrets"),
        (
            {"backend": "glo"},
            "run.backend: Input should be 'ccl', 'gloo' or 'mpi'; given was 'glo'. Did you mean 'gloo'?",
        ),
        ({"job_name": "Weekly QA"}, "run.job_name: "),
        ({"run_timeout": 0}, "run.run_timeout: "),
        ({"args": ["a", "b\0"]}, "run.args: a NUL character"),
        ({"env": {"A": "b\0c"}}, "run.env: a NUL character"),
        ({"env": {"A\0": "b"}}, "run.env: a NUL character"),
        ({"data": "./a\0b"}, "run.data: a NUL character"),
        ({"env": {"": "1"}}, "run.env: '' is no name of a variable; given was a mapping of ''."),
        ({"env": {"A=B": "1"}}, "run.env: 'A=B' is no name of a variable"),
    ],
)
def test_a_wrong_field_is_named_with_what_to_do(fields: dict[str, object], message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_run({**RUN, **fields})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("number", ["012", "1.10", "1_000", "0x1F", "1.0e-9", "0.00001", "+1", ".5", "1:4"])
def test_a_number_in_a_run_file_reaches_the_program_as_it_is_written(number: str) -> None:
    fields = parse_yaml(f"{{args: [--seed, {number}], env: {{SEED: {number}}}}}")
    run = read_run({**RUN, **fields})
    assert (run.args, run.env) == (("--seed", number), {"SEED": number})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("nnodes: 010", {"nnodes": 8}),
        ("nproc_per_node: 0x4", {"nproc_per_node": 4}),
        ("nproc_per_node: 1_0", {"nproc_per_node": 10}),
        ("run_timeout: 3600.", {"run_timeout": 3600}),
        ("run_timeout: +60", {"run_timeout": 60}),
        ("resources: {cpu: 1.50}", {"resources": Resources(cpu=1.5)}),
    ],
)
def test_a_field_takes_a_number_in_any_form_as_its_value(written: str, value: dict[str, Any]) -> None:
    run = read_run({**RUN, **parse_yaml(written)})
    assert run == read_run({**RUN, **value})
    assert run.model_dump_json() == read_run({**RUN, **value}).model_dump_json()


def test_a_number_in_a_toleration_is_a_plain_number() -> None:
    fields = parse_yaml("{kind: kubernetes, tolerations: [{key: a, tolerationSeconds: 1_000}]}")
    target = read_target(fields)
    assert isinstance(target, Kubernetes)
    assert as_yaml(*target.tolerations) == "key: a\ntolerationSeconds: 1000\n"


def test_a_key_that_is_written_twice_is_an_error_and_names_its_line() -> None:
    with pytest.raises(yaml.YAMLError, match=r"'nnodes' is written twice\s+in .*, line 3"):
        parse_yaml("run:\n  nnodes: 2\n  nnodes: 1\n")
    merged = parse_yaml("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b, x: 3}")
    assert merged["c"] == {"x": 3, "y": 2}


def test_an_argument_that_yaml_reads_as_a_truth_value_is_to_be_quoted() -> None:
    fields = {"program": "causal_lm", "output": "./out", "args": ["--shard", False]}
    with pytest.raises(BadInputError, match=r"run\.args\.1: a text is needed; given was False.*in quotes"):
        read_run(fields)


def test_a_missing_field_is_named_with_an_example() -> None:
    with pytest.raises(BadInputError, match=r"^run\.program: this field is needed\. .*question_answering"):
        read_run({"output": "./out"})


def test_several_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(BadInputError) as caught:
        read_run({"output": "./out", "nnodes": 0})
    assert "run.program" in str(caught.value)
    assert "run.nnodes" in str(caught.value)


def test_wrong_fields_of_run_and_target_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as refused:
        open_context({**RUN, "nproc": 2}, {"lanch": "x"}, "test", base=tmp_path)
    assert "- run.nproc: there is no such field. " in str(refused.value)
    assert "- target.lanch: there is no such field. Did you mean 'launch'?" in str(refused.value)


def test_no_target_is_this_machine() -> None:
    assert read_target(None) == Local()


def test_the_kind_decides_the_targets_fields() -> None:
    assert read_target({"kind": "baremetal", "hostfile": "hosts"}) == BareMetal(hostfile="hosts")
    with pytest.raises(BadInputError, match=r"^target\.hostfile: there is no such field"):
        read_target({"kind": "local", "hostfile": "hosts"})


@pytest.mark.parametrize("name", ["local", "kubernetes"])
def test_the_name_of_a_target_is_no_field(name: str) -> None:
    fields = {name: {"namespace": "ml"}}
    with pytest.raises(BadInputError, match=rf"^run\.{name}: there is no such field"):
        read_run(RUN | fields)
    with pytest.raises(BadInputError, match=rf"^target\.{name}: there is no such field"):
        read_target({"kind": "kubernetes"} | fields)


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInputError, match=r"there is no target 'slurm'\. Choose one of: local, baremetal"):
        read_target({"kind": "slurm"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "kubernets"}, r"^target\.kind: .*Did you mean 'kubernetes'"),
        ({"launch": "pytorchjobs"}, r"^target\.launch: .*'pytorchjob'.* or '\w+'; given was 'pytorchjobs'"),
        ({"namespce": "ml"}, r"^target\.namespce: .*Did you mean 'namespace'"),
        ({"launch": "mpijobs"}, r"^target\.launch: .*; given was 'mpijobs'\. Did you mean 'mpijob'\?"),
        ({"claim_size": "20 GB"}, r"^target\.claim_size: .*given was '20 GB'\. Size of a claim"),
        ({"tolerations": ["x"]}, r"^target\.tolerations\.0: a mapping is needed; .*Tolerations of the"),
        ({"node_selector": {"pool": 1}}, r"^target\.node_selector\.pool: .*Labels of the nodes"),
    ],
)
def test_a_wrong_field_of_a_cluster_is_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        read_target({"kind": "kubernetes"} | fields)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"launch": "mpijob"}, "Set target.kind to 'kubernetes' to have it."),
        ({"launch": "mpirun", "kind": "kubernetes"}, "Set target.kind to 'local' or 'baremetal' to have it."),
        ({"launch": "mpirunn"}, "Did you mean 'mpirun'?"),
        ({"launch": "slurm"}, "What starts the ranks: "),
        ({"namespace": "ml"}, "Set target.kind to 'kubernetes' to have it."),
        ({"mpi": "openmp", "kind": "kubernetes"}, "Did you mean 'openmpi'?"),
    ],
)
def test_what_another_kind_of_target_has_or_is_written_so_is_named(
    fields: dict[str, object], fix: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        read_target(fields)
    assert fix in str(caught.value)


def test_every_pattern_of_a_field_has_words() -> None:
    fields = [field for model in (*MODELS, Resources) for field in model.model_fields.values()]
    patterns = {getattr(each, "pattern", None) for field in fields for each in field.metadata}
    assert patterns - {None} == set(PATTERN_HINTS)


def test_a_run_cannot_be_changed() -> None:
    run = read_run(RUN)
    with pytest.raises(ValueError, match="frozen"):
        run.nnodes = 2  # type: ignore[misc]


@pytest.mark.parametrize("field", sorted(EXPLAINED))
def test_every_field_explains_itself(field: str) -> None:
    if field == "kind":
        return
    assert EXPLAINED[field].description
    assert isinstance(EXPLAINED[field].json_schema_extra, dict)


def test_a_target_holds_no_nul_either() -> None:
    for fields in ({"directory": "a\0b"}, {"kind": "baremetal", "hostfile": "h", "ssh": ["ssh", "\0"]}):
        with pytest.raises(BadInputError, match=rf"^target\.{list(fields)[-1]}: a NUL character"):
            read_target(fields)


@pytest.mark.parametrize(
    "fields",
    [
        *[{"data": ["URL"]}, {"env": {"A": ["URL"]}}, {"env": {"": "hunter2"}}, {"URL": 1}],
        {"kubernetes": {"env": "hunter2"}},
    ],
)
def test_no_error_and_no_traceback_shows_credentials(fields: dict[str, object]) -> None:
    given = json.loads(json.dumps(fields).replace("URL", "https://bob:hunter2@host/set"))
    with pytest.raises(BadInputError) as caught:
        read_run({**RUN, **given})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("read", [read_run, read_target])
@pytest.mark.parametrize("given", ["qa.yaml", "", ["program"], 3])
def test_what_is_no_mapping_is_refused_by_name(read: Callable[[Any], object], given: object) -> None:
    field = "run" if read is read_run else "target"
    with pytest.raises(BadInputError, match=rf"^{field}: a mapping is needed; given was a .*dictionary"):
        read(given)


def test_an_amount_that_no_number_holds_is_refused_with_its_field() -> None:
    with pytest.raises(BadInputError, match=r"run\.resources\.memory: an amount is needed, such as 8Gi"):
        read_run({"program": "a.py", "output": "o", "resources": {"memory": "9" * 400}})


@pytest.mark.parametrize("prefix", ["file://", "file://localhost", "local://"])
@pytest.mark.usefixtures("home")
def test_urls_of_this_disk_are_its_paths(prefix: str, tmp_path: Path) -> None:
    names = ("data", "model", "output", "checkpoints", "resume_from", "code", "program")
    run = {name: f"{prefix}{tmp_path}/{name}.py" for name in names}
    ctx = open_context(run, {"directory": f"{prefix}{tmp_path}/home"}, "test", base=tmp_path / "base")
    assert {name: getattr(ctx.run, name) for name in names} == {
        name: f"{tmp_path}/{name}.py" for name in names
    }
    assert ctx.target_fields["directory"] == f"{tmp_path}/home"
    assert home(f"{prefix}{tmp_path}/home") == tmp_path / "home"


@pytest.mark.parametrize("url", ["file://models/qa", "local://models/qa", "file://"])
@pytest.mark.parametrize("field", ["output", "checkpoints"])
def test_urls_of_disks_of_other_hosts_are_refused(field: str, url: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=f"{url} names no path of this host") as refused:
        open_context({**RUN, field: url}, None, "test", base=tmp_path)
    assert refused.value.field == f"run.{field}"
