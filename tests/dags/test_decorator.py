"""``@task.manycpu``: functions of DAG files that train, in this process, each a whole run in one task."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, task

from manycpu.operators import following, train
from manycpu.operators.airflow_versions import CALLS_ON_KILL
from manycpu.operators.decorator import _OPERATOR_OPTIONS, FunctionOperator
from manycpu.operators.train import RETRY_DELAY
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets import driver_of
from manycpu.pipeline.verbs.cleanup import cleanup

RunDag = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.usefixtures("home", "no_process_left", "light_torch")

SWEEP = """
import os
from pathlib import Path
from airflow.sdk import dag, task

STEPS = 2 * 2

def written(folder, name):
    return Path(folder, name)

@dag(schedule=None)
def sweep():
    @task.manycpu(nnodes=2, output="../models/{{ ti.map_index }}")
    def fit(data, lr, output, checkpoints, note=""):
        from manycpu.pipeline.node.metrics import metrics
        written(output, "model").write_text(str(lr))
        assert Path(checkpoints).is_dir()
        metrics({"loss": 1 - lr})
        return {"lr": lr, "steps": STEPS, "data": Path(data).read_text(), "note": note}

    @task
    def best(results, folder):
        import json
        from pathlib import Path
        Path(folder, "best.json").write_text(json.dumps(list(results)))

    note = "https://me:hunter2secret@host/{{ dag.dag_id }} {model}"
    one = fit.override(nnodes=1, resources={"cpu": 1}, max_active_tis_per_dag=1)
    best(one.partial(data="../data.txt", note=note).expand(lr=[0.1, 0.2]), FOLDER)

sweep()
"""
ONE = """
from airflow.sdk import Asset, asset, dag, task

LIMIT = 32 << 10

def fit(folder="FOLDER", go="FOLDER/go", checkpoints=None):
    import os, pathlib, time
    from manycpu.pipeline.node.metrics import progress
    pathlib.Path(folder, "tries").open("a").write("x")
    BODY

@dag(schedule=None)
def one():
    task.manycpu(OPTIONS)(fit)()

one()
"""
ASSET = """
from airflow.sdk import asset, task

@asset(schedule=None)
@task.manycpu(output="../out")
def trained(output, lr=0.5):
    from manycpu.pipeline.node.metrics import metrics
    metrics({"loss": lr})
    open(output + "/model", "w").write(str(lr))
    return lr
"""


def one(tmp_path: Path, body: str, options: str = "retries=0") -> str:
    return ONE.replace("FOLDER", str(tmp_path)).replace("BODY", body).replace("OPTIONS", options)


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


def test_a_sweep_is_runs_of_their_own_over_one_code(run_dag: RunDag, tmp_path: Path, home: Path) -> None:
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.utils.session import create_session

    (tmp_path / "data.txt").write_text("digits")
    ran = run_dag("sweep", SWEEP.replace("FOLDER", repr(str(tmp_path))))
    assert ran.state == "success", ran.said
    common = {"steps": 4, "data": "digits", "note": "https://me:hunter2secret@host/sweep {model}"}
    returned = json.loads((tmp_path / "best.json").read_text())
    assert returned == [{"lr": lr, **common} for lr in (0.1, 0.2)]
    reports = [report(tmp_path / "models" / index) for index in "01"]
    assert [one["metrics"] for one in reports] == [{"loss": 0.9}, {"loss": 0.8}]
    assert [one["returned"] for one in reports] == returned
    assert [one["run"]["resources"] for one in reports] == [{"cpu": 1.0}] * 2
    assert [(tmp_path / "models" / index / "model").read_text() for index in "01"] == ["0.1", "0.2"]
    assert len({one["name"] for one in reports}) == 2
    assert len({one["image"] for one in reports}) == 1, "arguments are no part of the code"
    assert [one["left_behind"] for one in reports] == [[], []]
    assert [list((home / name).iterdir()) for name in ("runs", "functions")] == [[], []]
    with create_session() as session:
        kept = [str(row.rendered_fields) for row in session.query(RenderedTaskInstanceFields)]
    assert "hunter2secret" not in "".join(kept), "of expanded tasks, too"


def test_a_result_that_cannot_be_passed_on_fails_without_a_retry(
    run_dag: RunDag, tmp_path: Path, home: Path
) -> None:
    ran = run_dag("one", one(tmp_path, 'return "x" * LIMIT', "retries=2, retry_delay=0"))
    assert ran.state == "failed"
    assert "fit returned 32,770 bytes of JSON, and 32,768 can be passed on" in ran.said
    assert (tmp_path / "tries").read_text() == "x"
    assert list((home / "runs").iterdir()) == []
    (written,) = (home / "reports").iterdir()
    assert report(written)["state"] == "failed"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(0)", "fit ended its process (sys.exit) where it is to return"),
        ("os._exit(0)", "rank 0 returned nothing"),
        ("return {1: 10, '1': 20}", "two keys of a mapping are '1' in JSON"),
    ],
)
def test_a_function_whose_result_would_be_another_one_fails(
    body: str, said: str, run_dag: RunDag, tmp_path: Path, home: Path
) -> None:
    ran = run_dag("one", one(tmp_path, body, "retries=0"))
    assert ran.state == "failed"
    assert said in ran.said
    assert list((home / "runs").iterdir()) == []


POLICY = """
    retry_policy=__import__("airflow.sdk", fromlist=["sdk"]).ExceptionRetryPolicy(
        rules=[], default=__import__("airflow.sdk", fromlist=["sdk"]).RetryAction.FAIL
    )
"""


@pytest.mark.parametrize(
    ("options", "tries"),
    [
        ("", 2),
        pytest.param(POLICY, 1, marks=pytest.mark.skipif(not CALLS_ON_KILL, reason="new in Airflow 3.3")),
    ],
)
def test_a_failed_try_leaves_its_checkpoints_to_the_next_and_the_last_one_keeps_them_alone(
    run_dag: RunDag, tmp_path: Path, home: Path, options: str, tries: int
) -> None:
    body = """
    with pathlib.Path(checkpoints, "steps").open("a") as steps:
        steps.write("x")
    raise SystemExit("after " + pathlib.Path(checkpoints, "steps").read_text())
"""
    ran = run_dag("one", one(tmp_path, body.strip(), f"retries=1, retry_delay=0, {options.strip()}"))
    assert ran.state == "failed"
    assert f"after {tries * 'x'}" in ran.said
    (run,) = (path for path in (home / "runs").iterdir() if path.is_dir())
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["steps"]
    (written,) = (home / "reports").iterdir()
    assert (report(written)["attempts"], report(written)["left_behind"]) == (tries, [])


def test_the_next_try_attaches_where_the_worker_went_away(
    run_dag: RunDag, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow presumes the first try dead while its training runs; the second defers, and is resumed."""
    go = tmp_path / "go"

    def state_of(place: dict[str, Any]) -> str | None:
        if (tmp_path / "tries").exists() and not go.exists():
            go.touch()
            return "up_for_retry"
        return following.state_of(place)

    monkeypatch.setattr("manycpu.operators.train.state_of", state_of)
    monkeypatch.setattr(train, "SETTLE_S", 0.0)  # no scheduler is there to settle
    body = f"""
    while not os.path.exists(go):
        time.sleep(0.1)
    while not list(pathlib.Path({str(home)!r}).glob("runs/*/attempts/*/told.*")):
        progress(step=1, seconds_left=3600)
        time.sleep(0.1)  # until the trigger has come
    return {{"went": "on"}}
"""
    ran = run_dag("one", one(tmp_path, body.strip(), "retries=1, retry_delay=0"))
    assert ran.state == "success", ran.said
    assert "if a try is left, it attaches to it" in ran.said
    assert "attached to attempt 1" in ran.said
    assert (tmp_path / "tries").read_text() == "x"
    (written,) = (home / "reports").iterdir()
    assert (report(written)["attempts"], report(written)["returned"]) == (1, {"went": "on"})
    assert list((home / "runs").iterdir()) == []


def test_a_model_that_could_not_be_exported_stays_after_the_last_try(
    run_dag: RunDag, tmp_path: Path, home: Path
) -> None:
    body = f"""
    open(os.environ["MANYCPU_OUTPUT"] + "/model", "w").write("x")
    open({str(tmp_path / "out")!r}, "w").write("in the way")
"""
    ran = run_dag("one", one(tmp_path, body.strip(), "retries=1, retry_delay=0, output='../out'"))
    assert ran.state == "failed"
    (folder,) = (home / "runs").glob("fit-*")
    assert (folder / "attempts" / "1" / "output" / "model").read_text() == "x"
    assert (tmp_path / "tries").read_text() == "x", "it is not trained again"
    (tmp_path / "out").unlink()
    (ctx,) = driver_of("local").runs(Local(directory=str(home)))
    cleanup(ctx, keep=False, delete_model=True)


def test_an_asset_is_made_by_a_function_that_trains(run_dag: RunDag, tmp_path: Path) -> None:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session

    ran = run_dag("trained", ASSET)
    assert ran.state == "success", ran.said
    with create_session() as session:
        (extra,) = [event.extra for event in session.query(AssetEvent) if event.source_dag_id == "trained"]
    assert extra["path"] == str(tmp_path / "out")
    assert extra["metrics"] == {"loss": 0.5}
    assert extra["sha256"] == report(tmp_path / "out")["export"]["sha256"]


OF_A_TEAM = """
from airflow.sdk import dag, task
from common_of_team.rates import RATE

class Config:
    lr = 0.1

@dag(schedule=None)
def of_a_team():
    @task.manycpu(retries=0)
    def fit():
        import helper_of_team
        return {"lr": Config.lr, "rate": RATE, "more": helper_of_team.MORE}
    fit()

of_a_team()
"""


def test_modules_of_the_dags_folder_are_in_the_ranks(
    run_dag: RunDag, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow has the folder on sys.path; the ranks have not, and are told to see nothing else of it."""
    package = tmp_path / "dags" / "common_of_team"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rates.py").write_text("import helper_of_team\nRATE = helper_of_team.MORE * 2\n")
    (tmp_path / "dags" / "helper_of_team.py").write_text("MORE = 3\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "dags")])
    ran = run_dag("of_a_team", OF_A_TEAM)
    assert ran.state == "success", ran.said
    (written,) = (home / "reports").iterdir()
    assert report(written)["returned"] == {"lr": 0.1, "rate": 6, "more": 3}


def test_what_the_file_changes_below_the_call_is_seen_when_the_task_runs(run_dag: RunDag) -> None:
    """While the file is read this is unknown: the task's call stands before it."""
    text = OF_A_TEAM.replace("from common_of_team.rates import RATE", "RATE = 1").replace(
        "        import helper_of_team\n", ""
    )
    late = "\ndef change():\n    setattr(Config, 'lr', 0.5)\nchange()\n"
    ran = run_dag("of_a_team", text.replace("helper_of_team.MORE", "1") + late)
    assert ran.state == "failed"
    assert "which is changed after its definition (Config.lr is 0.5, and is written as 0.1)" in ran.said


def operator(made: Any) -> Any:
    """Take the operator of what a decorated function returned."""
    return made.operator


def decorator(**options: Any) -> Any:
    """Make the decorator as DAG files do."""
    return task.manycpu(**options)


def fit(lr: float = 0.1, data: Any = None, **more: Any) -> Any:
    """Train nothing."""
    return lr, data, more


WRONG = [
    ({"nnodse": 2}, {}, r"run\.nnodse: there is no such field\. Did you mean 'nnodes'"),
    ({"nproc_per_node": 0}, {}, r"run\.nproc_per_node: "),
    ({"program": "x.py"}, {}, r"run\.program: the function is the program"),
    ({"code": "."}, {}, r"run\.code: the function is the program"),
    ({"args": ["x"]}, {}, r"run\.args: the function is the program"),
    ({"target": {"kind": "loca"}}, {}, r"target\.kind: "),
    ({"resources": {"cpus": 1}}, {}, r"run\.resources\.cpus: there is no such field"),
    ({}, {"data": 3.5j}, r"run\.data: "),
    ({}, {"lr": 3.5j}, r"fit: its arguments are no JSON: there is a complex among them"),
    ({}, {"lr": b"ab"}, r"fit: its arguments are no JSON: there is a bytes among them"),
    ({}, {"lr": [bytearray(b"ab")]}, r"fit: its arguments are no JSON: there is a bytearray among them"),
    ({}, {"lr": {1: 10, "1": 20}}, r"fit: its arguments are no JSON: a mapping has the key 1, which would"),
    ({}, {"lr": [{"a": {None: 1}}]}, r"fit: its arguments are no JSON: a mapping has the key None, which"),
    ({}, {"lr": "x" * 40_000}, r"fit: its arguments take 40,\d+ bytes of JSON, and 32,768 can be passed on"),
]


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(("options", "arguments", "words"), WRONG)
def test_what_is_wrong_is_known_when_the_dag_file_is_read(
    options: dict[str, Any], arguments: dict[str, Any], words: str, *, expanded: bool
) -> None:
    decorated = decorator(**options)(fit)
    with DAG("wrong", schedule=None), pytest.raises(BadInputError, match=words):
        decorated.partial(**arguments).expand(other=[1]) if expanded else decorated(**arguments)


def test_what_templates_and_tasks_will_give_is_not_judged_before() -> None:
    with DAG("later", schedule=None) as dag:
        options = {"nproc_per_node": "{{ params.n }}", "target": {"kind": "{{ params.kind }}"}}
        first = decorator(**options)(fit)(lr="{{ params.lr }}")
        decorator(env={"A": "{{ ds }}"})(fit).override(task_id="second")(first, data=first)
    assert dag.task_ids == ["fit", "second"]
    assert dag.get_task("second").upstream_task_ids == {"fit"}


def test_missing_arguments_are_airflows_to_refuse_but_a_place_may_be_an_option() -> None:
    def learn(data: str, output: str, checkpoints: str) -> None: ...

    with DAG("places", schedule=None):
        with pytest.raises(TypeError, match="missing a required argument: 'output'"):
            decorator(data="./x")(learn)()
        made = operator(decorator(data="./x", output="./y")(learn)(data="./z"))
    assert isinstance(made, FunctionOperator)
    assert made.op_kwargs == {"data": "./z", "output": "./y", "checkpoints": None}


def test_a_place_that_the_call_gives_as_none_wins_over_the_option() -> None:
    def learn(data: str | None = "./default", output: str | None = None) -> None: ...

    with DAG("none", schedule=None):
        made = operator(decorator(data="./x", output="./y")(learn)(data=None, output=None))
    fields, _ = made._fields({}, "0123456789")
    assert (fields["data"], fields["output"]) == (None, None)
    assert json.loads(fields["args"][0]) == {"arguments": {"data": None, "output": None}, "places": []}


def test_a_model_may_be_registered_whose_output_a_template_says() -> None:
    def learn(output: str) -> None: ...

    options = {"tracking": ["mlflow"], "registered_model": "qa"}
    with DAG("registered", schedule=None):
        made = operator(decorator(**options)(learn)(output="/models/{{ run_id }}"))
        with pytest.raises(BadInputError, match=r"there is no model to register where run.output is null"):
            decorator(**options)(fit)()
    assert isinstance(made, FunctionOperator)


def test_a_task_is_tried_twice_unless_somebody_says_otherwise() -> None:
    def retries(default_args: dict[str, Any], **options: Any) -> list[int]:
        with DAG("tries", schedule=None, default_args=default_args):
            decorated = decorator(**options)(fit)
            return [operator(decorated()).retries, operator(decorated.expand(lr=[1])).retries]

    assert retries({}) == [1, 1]
    assert retries({"retries": 3}) == [3, 3]
    assert retries({"retries": 3}, retries=0) == [0, 0]
    with DAG("delay", schedule=None):
        task = decorator()(fit)
        assert {operator(task()).retry_delay, operator(task.expand(lr=[1])).retry_delay} == {RETRY_DELAY}


def test_a_field_of_the_run_that_airflow_has_too_is_the_runs() -> None:
    both = {*TrainingRun.model_fields} & {*_OPERATOR_OPTIONS}
    assert both == set(), "Airflow has come to have an option of that name"
    with DAG("resources", schedule=None):
        decorated = decorator(resources={"cpu": 2})(fit).override(resources={"memory": "1Gi"})
        called, expanded = operator(decorated()), operator(decorated.expand(lr=[1]))
    assert called.run["resources"] == expanded.partial_kwargs["run"]["resources"] == {"memory": "1Gi"}


def test_a_partial_is_refused_by_name_when_the_dag_file_is_read() -> None:
    with pytest.raises(BadInputError, match="it is no function"):
        task.manycpu(target={"kind": "local"})(partial(print, 1))
