"""Whole DAG runs in this process, with real trainings: what ends well, and what ends badly and says why."""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.event_collector import EventCollector
from support.waiting import until

from manycpu.operators import following, train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.event_types import Event
from manycpu.pipeline.spec.events import RankLine

RunDag = Callable[..., SimpleNamespace]
PLAIN = {"data": None, "model": None, "args": "", "dtype": "fp32", "nproc_per_node": 1, "oversubscribe": True}
OWN = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None, params={{"name": "left"}})
def own():
    training_pipeline(run={run!r}, default_args={{"retries": 0}})

own()
"""

ALONE = """
from airflow.sdk import dag
from manycpu.operators import TrainOperator

RUN = {run!r}

@dag(schedule=None)
def alone():
    for name in ("a", "b"):
        TrainOperator(task_id=name, run=RUN | {{"args": [name], "output": f"{{RUN['output']}}-{{name}}"}})
    runs = [RUN | {{"args": [name], "output": f"{{RUN['output']}}-{{name}}"}} for name in ("c", "d")]
    TrainOperator.partial(task_id="mapped").expand(run=runs)

alone()
"""

SINGLY = """
from airflow.sdk import dag
from manycpu.operators import CleanupOperator, ExportModelOperator, PrepareOperator, TrainOperator

RUN = {run!r}

@dag(schedule=None)
def singly():
    prepare = PrepareOperator(task_id="begin", training="one", run=RUN)
    train = TrainOperator(task_id="train", training="one", run=RUN)
    foreign = TrainOperator(task_id="foreign", training="one", run=RUN | {{"args": ["other"]}})
    export = ExportModelOperator(task_id="export", run=RUN, handle=train.output)
    cleanup = CleanupOperator(task_id="clean", training="one", run=RUN, trigger_rule="all_done")
    prepare >> train >> foreign >> cleanup
    export >> cleanup

singly()
"""

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
WRITES = "import os; open(os.environ['MANYCPU_OUTPUT'] + '/model.txt', 'w').write('the model')"


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


def own(**run: object) -> str:
    """Write a DAG whose training is tried once."""
    return OWN.format(run={"nproc_per_node": 2, "oversubscribe": True, **run})


def test_templates_are_rendered_and_two_ranks_train(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path, home: Path
) -> None:
    script()
    text = own(program="../code/train.py", output="../out/{{ params.name }}", env={"TAG": "{{ dag.dag_id }}"})
    ran = run_dag("own", text, {"name": "right"})
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"})
    output = tmp_path / "out" / "right"
    assert (output / "model.txt").read_text() == "sum 2"
    written = report(output)
    assert (written["state"], written["world_size"], written["left_behind"]) == ("succeeded", 2, [])
    assert written["run"]["env"] == {"TAG": "own"}
    assert written["dag"] == {"dag_id": "own", "run_id": ran.run_id, "instance": "tests"}
    assert f"report: {output}/report.json" in ran.said
    assert list((home / "runs").iterdir()) == []


def test_the_first_rank_that_failed_is_in_the_tasks_error(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    program = script("import os, sys\nprint('no such column: age', flush=True)\nsys.exit(3)")
    ran = run_dag("own", own(program=program, nproc_per_node=1, output=str(tmp_path / "out")))
    assert ran.state == "failed"
    expected = {"train": "failed", "export": "upstream_failed", "cleanup": "success", "report": "failed"}
    assert ran.tasks | expected == ran.tasks
    assert "rank 0 on" in ran.said
    assert "exit code 3; its last lines:" in ran.said
    written = report(tmp_path / "out")
    assert (written["state"], written["left_behind"]) == ("failed", [])
    assert "no such column: age" in written["error"]


def test_ranks_that_never_meet_fail_without_a_retry(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    program = script("print('alone', flush=True)")
    conf = PLAIN | {"program": program, "nproc_per_node": 2, "output": str(tmp_path / "out")}
    ran = run_dag("train", conf=conf)
    assert (ran.state, ran.tasks["train"]) == ("failed", "failed")
    assert "without ever initialising torch.distributed" in ran.said
    assert report(tmp_path / "out")["attempts"] == 1


def test_cleanup_runs_when_stage_fails_and_the_run_is_failed(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path, home: Path
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("0123456789")
    home.mkdir()
    (home / "data").write_text("a file where staged data goes")
    text = own(program=script(), data=str(data), output=str(tmp_path / "out"))
    ran = run_dag("own", text)
    assert ran.state == "failed"
    expected = {"stage": "failed", "train": "upstream_failed", "cleanup": "success", "report": "failed"}
    assert ran.tasks | expected == ran.tasks
    written = report(tmp_path / "out")
    assert (written["state"], written["verbs"]["stage"]["result"]) == ("failed", "failed")
    assert written["verbs"]["stage"]["error"] in written["error"]
    assert list((home / "runs").iterdir()) == []


def test_a_cleared_run_that_fails_is_no_success_by_the_report_of_its_first_time(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    data, when = tmp_path / "data.txt", datetime(2026, 1, 1, tzinfo=UTC)
    data.write_text("x")
    program, where = script("import sys; open(sys.argv[1] + '/m', 'w').write('x')"), str(tmp_path / "out")
    text = own(program=program, args=["{output}"], data=str(data), nproc_per_node=1, output=where)
    text = text.replace("own()", "cleared()")  # cleared, a run must not meet other versions of its DAG
    first = run_dag("cleared", text, when=when)
    assert first.state == "success"
    data.unlink()
    ran = run_dag("cleared", text, when=when)
    assert ran.run_id == first.run_id
    assert (ran.tasks["prepare"], ran.tasks["report"], ran.state) == ("failed", "upstream_failed", "failed")


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_dag_run_that_a_person_marks_while_it_trains_is_failed_after_the_clean_up(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path, home: Path, state: str
) -> None:
    """There is no model. Airflow would take the DAG run for a success, since it skips what has not begun."""
    seen = tmp_path / "seen"
    program = script(f"open({str(seen)!r}, 'w').close()\nimport time\ntime.sleep(3600)")
    text = own(program=program, nproc_per_node=1, output=str(tmp_path / "out"))
    marking = threading.Thread(target=mark, args=("own", state, seen))
    marking.start()
    ran = run_dag("own", text)
    marking.join()
    expected = {"cleanup": "success", "report": "failed"}
    assert (ran.tasks | expected, ran.state) == (ran.tasks, "failed")
    assert report(tmp_path / "out")["state"] == "cancelled"
    assert list((home / "runs").iterdir()) == []


def mark(dag_id: str, state: str, when: Path) -> None:
    """Mark the DAG run that runs, as a person does, once there is a file."""
    from airflow.api.common import mark_tasks
    from airflow.models.dagbag import DBDagBag
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    until(when.exists)
    with create_session() as session:
        run = session.scalars(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.state == "running")).one()
        dag = DBDagBag().get_latest_version_of_dag(dag_id, session=session)
        change = getattr(mark_tasks, f"set_dag_run_state_to_{state}")
        change(dag=dag, run_id=run.run_id, commit=True, session=session)


@pytest.mark.parametrize(
    ("conf", "field"),
    [({"program": "./no-such-script.py"}, "run.program"), ({"dtpye": "bf16"}, "params.dtpye")],
)
def test_bad_input_fails_prepare_and_names_the_field(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path, conf: dict[str, Any], field: str
) -> None:
    ran = run_dag("train", conf=PLAIN | {"program": script(), "output": str(tmp_path / "out")} | conf)
    assert ran.state == "failed"
    assert ran.tasks["prepare"] == "failed"
    assert ran.tasks["train"] == "upstream_failed"
    assert f"{field}: " in ran.said
    assert not (tmp_path / "out").exists()


def test_a_program_that_is_to_write_no_model_succeeds_and_its_metrics_are_told(
    run_dag: RunDag, script: Callable[..., str], home: Path
) -> None:
    """The form has text alone: the word null. The report goes from cleanup to report as an XCom."""
    text = "from manycpu.pipeline.node.emit import say\nsay('metrics', values={'accuracy': 0.5})\n"
    ran = run_dag("train", conf=PLAIN | {"program": script(text), "output": "null"})
    assert ran.state == "success"
    assert "accuracy: 0.5" in ran.said
    assert not (home / "models").exists()
    assert len(list((home / "reports").iterdir())) == 1


HANDS_OVER = """
from airflow.sdk import dag
from manycpu.operators import TrainOperator

@dag(schedule=None)
def hands_over():
    TrainOperator(task_id="train", run={run!r})

hands_over()
"""
REPORTS = """
import os, time
from pathlib import Path
from manycpu.pipeline.node.metrics import metrics, progress
progress(step=1, seconds_left=3600)
while not [*Path(os.environ["ATTEMPTS"]).glob("*/attempts/*/told.*")]:
    time.sleep(0.05)  # until the trigger has come
progress(step=2, seconds_left=0)
metrics({"f1": 90.0}, step=2)
"""


def test_a_listener_hears_each_event_once_from_the_worker_and_the_trigger(
    run_dag: RunDag, script: Callable[..., str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, logs, listeners = EventCollector(), set(), following.listeners

    def with_collector(log: Any, *run: Any) -> tuple[Any, ...]:
        logs.add(log.name)
        return (*listeners(log, *run), collector)

    monkeypatch.setattr(following, "listeners", with_collector)
    monkeypatch.setattr(train, "SETTLE_S", 0.0)  # no scheduler is there to settle
    run = {
        "program": script(REPORTS),
        "output": None,
        "nproc_per_node": 1,
        "env": {"ATTEMPTS": f"{home}/runs"},
    }
    assert run_dag("hands_over", HANDS_OVER.format(run=run)).state == "success"
    kinds = [kind for kind in collector.kinds if kind != "start"]
    assert kinds == ["proof", "progress 1", "progress 2", "metrics 2", "exit"]
    assert len(logs) == 2, "the worker, and the trigger that takes over"


class Raises(Silent):
    """A listener that is broken."""

    def event(self, event: Event, line: RankLine) -> None:
        raise OSError(f"no room for {event.event} of rank {line.rank}")


def test_a_listener_that_raises_ends_no_training(
    run_dag: RunDag,
    script: Callable[..., str],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither in the worker nor in the trigger; each calls it no more, and tells the others."""
    collector, listeners = EventCollector(), following.listeners
    monkeypatch.setattr(following, "listeners", lambda *run: (Raises(), *listeners(*run), collector))
    monkeypatch.setattr(train, "SETTLE_S", 0.0)  # no scheduler is there to settle
    env = {"ATTEMPTS": f"{home}/runs"}
    run = {"program": script(REPORTS), "output": None, "nproc_per_node": 1, "env": env}
    ran = run_dag("hands_over", HANDS_OVER.format(run=run))
    assert ran.state == "success", ran.said
    assert [kind for kind in collector.kinds if kind != "start"][-2:] == ["metrics 2", "exit"]
    told = "Raises failed, and is called no more; the run continues: no room for"
    assert len([message for message in caplog.messages if message.startswith(told)]) == 2


def test_trainings_that_a_dag_describes_apart_are_apart(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    text = f"import sys; open({str(tmp_path)!r} + '/trained-' + sys.argv[1], 'w')"
    run = {"program": script(text), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    ran = run_dag("alone", ALONE.format(run=run))
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"})
    assert sorted(path.name[-1] for path in tmp_path.glob("trained-*")) == ["a", "b", "c", "d"]


def test_operators_used_singly_share_the_run_that_they_are_told_to(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path, home: Path
) -> None:
    run = {"program": script(WRITES), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    ran = run_dag("singly", SINGLY.format(run=run))
    expected = {"begin": "success", "train": "success", "export": "success", "clean": "success"}
    assert ran.tasks == expected | {"foreign": "failed"}
    refused = "training: task foreign of DAG singly and task train of DAG singly are one run, train-"
    assert refused in ran.said
    assert "differ in run.args" in ran.said
    written = report(tmp_path / "out")
    assert (written["state"], written["attempts"], written["error"]) == ("succeeded", 1, None)
    assert list((home / "runs").iterdir()) == []


def test_a_bucket_is_for_airflows_that_can_be_told_apart(
    run_dag: RunDag, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__MANYCPU__INSTANCE", "")
    ran = run_dag("train", conf=PLAIN | {"program": script(), "output": "s3://models/out"})
    assert (ran.state, ran.tasks["prepare"]) == ("failed", "failed")
    assert "[manycpu] instance: this Airflow has no unique name" in ran.said


def test_credentials_of_a_url_are_masked_where_airflow_shows_a_run(
    run_dag: RunDag, script: Callable[..., str]
) -> None:
    """In the log, and in what Airflow keeps of rendered templates."""
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.utils.session import create_session

    data = "https://user:hunter2secret@127.0.0.1:1/set?sig=s3cr3tvalue"
    ran = run_dag("own", own(program=script(), data=data, output="/proc/none"))
    with create_session() as session:
        kept = [str(row.rendered_fields) for row in session.query(RenderedTaskInstanceFields)]
    assert ran.state == "failed"
    assert kept
    assert not [text for text in [ran.said, *kept] if "hunter2secret" in text or "s3cr3tvalue" in text]


SAYS = """
import json, os, sys
with open(os.environ["SEEN"], "a") as seen:
    print(json.dumps([os.environ["HF_TOKEN"], sys.argv[2]]), file=seen)
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("the model")
sys.exit(os.environ["MANYCPU_ATTEMPT"] == "1")
"""


UNTRAINED = """
from airflow.sdk import dag
from manycpu.operators import CleanupOperator, PrepareOperator

RUN = {run!r}

@dag(schedule=None)
def untrained():
    prepare = PrepareOperator(task_id="prepare", training="one", run=RUN)
    prepare >> CleanupOperator(task_id="cleanup", training="one", run=RUN)

untrained()
"""


def test_no_xcom_holds_the_value_of_a_variable(run_dag: RunDag, script: Callable[..., str]) -> None:
    """With output null the whole report is an XCom, and a template may put any secret into a variable."""
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    run = {"program": script(), "output": None, "env": {"DATABASE": "db://hunter2secret"}}
    ran = run_dag("untrained", UNTRAINED.format(run=run))
    assert ran.state == "success", ran.said
    with create_session() as session:
        xcoms = {
            row.key: json.dumps(row.value) for row in session.query(XComModel).filter_by(dag_id="untrained")
        }
    assert "left_behind" in xcoms["return_value"]
    assert not [key for key, text in xcoms.items() if "hunter2secret" in text]


def test_what_is_called_like_a_secret_is_shown_nowhere_and_reaches_each_attempt(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path
) -> None:
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    env = {"HF_TOKEN": "hunter2secret", "SEEN": str(tmp_path / "seen")}
    args = ["--api-key", "s3cr3tvalue"]
    text = own(program=script(SAYS), output=str(tmp_path / "out"), env=env, args=args, nproc_per_node=1)
    ran = run_dag("own", text.replace('"retries": 0', '"retries": 1, "retry_delay": 0'))
    assert ran.state == "success", ran.said
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen == [["hunter2secret", "s3cr3tvalue"]] * 2
    with create_session() as session:
        fields = session.query(RenderedTaskInstanceFields).filter_by(dag_id="own")
        xcoms = session.query(XComModel).filter_by(dag_id="own")
        kept = {"fields": [str(row.rendered_fields) for row in fields]}
        kept["XComs"] = [json.dumps(row.value, default=str) for row in xcoms]
    kept |= {"log": [ran.said]}
    kept |= {name: [(tmp_path / "out" / name).read_text()] for name in ("report.json", "report.html")}
    assert all(kept.values())
    for secret in ("hunter2secret", "s3cr3tvalue"):
        assert not [place for place, texts in kept.items() for each in texts if secret in each]
