"""From a new version of a data set to a model in use, with a person's approval in between.

1. `digits_dataset` writes the next version of the data set, and its asset starts this DAG.
2. A sweep trains three candidates, two at a time; the best one is chosen.
3. It is evaluated beside the present champion, on digits that neither has seen.
4. If it is better by more than the `threshold`, a person has to approve (`ask`); without `ask`, none has to.
5. It is promoted: asset `champion-model`. A batch prediction runs with it.

If it is rejected or not better, nothing is promoted, and `conclude` says so. The other models are deleted.
See docs/champion.md.
"""

import os
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Asset, Param, dag, task, task_group

from manycpu.operators.airflow_versions import approval_timeout
from manycpu.operators.champion import steps

DIGITS, CHAMPION = Asset("digits"), Asset("champion-model")
MAX_PARALLEL = 2  # candidates that train at the same time
# With MLflow, each candidate is a run there, and the champion's version has the alias `champion`.
IS_TRACKED = bool(os.environ.get("MLFLOW_TRACKING_URI"))
TRACKED: dict[str, Any] = {"tracking": ["mlflow"], "registered_model": "digits"} if IS_TRACKED else {}
APPROVAL_TIMEOUT = timedelta(days=7)  # without an answer within that time, nothing is promoted
FOLDER = Param(
    None,
    type=["null", "string"],
    description="Where data sets, champions and predictions are: a folder that every worker sees. "
    "Left empty: champion, in $MANYCPU_HOME.",
)
TAGS = ["manycpu", "example"]


@dag(
    schedule=None,
    max_active_runs=1,
    params={
        "more": Param(
            300, type="integer", minimum=10, description="Digits to train on that each version adds."
        ),
        "folder": FOLDER,
    },
    tags=TAGS,
    doc_md="Write the next version of the data set of handwritten digits, which starts DAG `champion`.",
)
def digits_dataset() -> None:
    task(outlets=[DIGITS])(steps.new_version)()


@dag(
    schedule=DIGITS,
    max_active_runs=1,
    params={
        "rates": Param(
            [0.03, 0.3, 1.0],
            type="array",
            items={"type": "number", "exclusiveMinimum": 0},
            minItems=1,
            description="Learning rates: one candidate for each.",
        ),
        "ask": Param(True, type="boolean", description="Whether a person has to approve a better model."),
        "threshold": Param(
            0.0, type="number", description="How much better it must be: 0.01 is one digit in a hundred."
        ),
        "nproc_per_node": Param(2, type="integer", minimum=1, description="Processes of each training."),
        "target": Param({"kind": "local"}, type="object", description="Where all trainings run."),
        "folder": FOLDER,
    },
    # Every step may be retried: also the approval, which Airflow fails if the answer comes at once.
    default_args={"retries": 1, "retry_delay": timedelta(seconds=5)},
    tags=TAGS,
    doc_md=__doc__,
)
def champion() -> None:
    started: Any = task(multiple_outputs=True)(steps.begin)()
    common: dict[str, Any] = {name: started[name] for name in ("nproc_per_node", "target")}

    # One candidate: train it with a rate, and describe the result, even if the training failed.
    @task_group
    def candidate(rate: float) -> Any:
        @task.manycpu(oversubscribe=True, max_active_tis_per_dagrun=MAX_PARALLEL, **common, **TRACKED)
        def fit(rate: float, data: str, output: str) -> dict[str, float]:
            from manycpu.pipeline.recipes import digits

            return digits.fit(rate, data, output)

        output = "{{ ti.xcom_pull(task_ids='begin', key='models') }}/candidate-{{ ti.map_index }}"
        fitted: Any = fit(rate=rate, data=started["train"], output=output)
        described: Any = task(trigger_rule="all_done")(steps.describe)(  # also if the training failed
            rate=rate, output=output, training=fitted.operator.task_id
        )
        fitted >> described
        return described

    @task.manycpu(oversubscribe=True, **common)
    def evaluate(model: str, data: str) -> dict[str, float]:
        from manycpu.pipeline.recipes import digits

        return digits.evaluate(model, data)

    @task.manycpu(oversubscribe=True, **common)
    def predict(model: str, data: str, output: str) -> dict[str, int]:
        from manycpu.pipeline.recipes import digits

        return digits.predict(model, data, output)

    candidates: Any = candidate.expand(rate=task(steps.rates)())
    contenders: Any = task(steps.choose)(candidates, started["run"], started["version"])
    paths: Any = contenders.map(steps.path_of)
    judged: Any = evaluate.partial(data=started["holdout"]).expand(model=paths)
    compared: Any = task(multiple_outputs=True)(steps.compare)(contenders, judged, candidates)
    road: Any = task.branch(steps.road)(compared["better"])
    approve = ApprovalOperator(
        task_id="approve",
        subject="Is this model to be the champion?",
        body=compared["body"],
        defaults="Reject",  # without an answer in time
        **approval_timeout(APPROVAL_TIMEOUT),
    )
    # `promote` runs also if `road` skips `approve`.
    promoted: Any = task(
        outlets=[CHAMPION], multiple_outputs=True, trigger_rule="none_failed_min_one_success"
    )(steps.promote)(contenders, compared["accuracy"])
    predicted = predict(model=promoted["path"], data=started["unlabelled"], output=started["predictions"])
    tidied: Any = task(steps.tidy)(started["run"], started["models"])
    # `conclude` runs also if nothing was promoted: then `promote` and `predict` are skipped.
    concluded: Any = task(trigger_rule="none_failed")(steps.conclude)()

    road >> [approve, promoted]  # `road` chooses one of them, or none
    approve >> promoted
    [compared, promoted, predicted] >> concluded
    # As a teardown of `begin`, `tidy` runs even if another task failed.
    concluded >> tidied.as_teardown(setups=started, on_failure_fail_dagrun=True)


digits_dataset()
champion()
