"""A scheduler, a worker and a triggerer in one process, for the one DAG run in the database of an Airflow.

States, tries, XComs and triggers are Airflow's own. If the process is killed, the next one takes over as Airflow
does: a task that ran is tried again, and a task that was deferred gets its trigger again.
"""

import asyncio
from pathlib import Path
from uuid import UUID

from airflow import settings
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db
from airflow.models.dagrun import DagRun
from airflow.models.trigger import Trigger
from airflow.sdk._shared.module_loading import import_string
from airflow.sdk.api.datamodels._generated import TaskInstance
from airflow.sdk.execution_time.supervisor import (
    InProcessTestSupervisor,
    in_process_api_server,
    run_task_in_process,
)
from airflow.serialization.serialized_objects import DagSerialization
from airflow.utils.state import DagRunState, TaskInstanceState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from httpx import AsyncClient
from sqlalchemy import select
from sqlalchemy.orm import configure_mappers

from manycpu.operators import following, train
from manycpu.operators.airflow_versions import dag_bag

RUNS = {TaskInstanceState.QUEUED, TaskInstanceState.RUNNING}


def warm_up():
    """Do once what takes seconds at the first request, before the process forks."""
    configure_mappers()
    transport = in_process_api_server().atransport

    async def ask():
        async with AsyncClient(transport=transport, base_url="http://in-process.invalid") as client:
            await client.get("/health")

    asyncio.run(ask())


def begin(folder):
    """Read the DAG file of a folder, and create a DAG run; returns 0."""
    session = settings.Session()
    manager = DagBundlesManager()
    manager.sync_bundles_to_db(session=session)
    session.commit()
    for bundle in manager.get_all_dag_bundles():
        bundle.initialize()
        bag = BundleDagBag(dag_folder=bundle.path, bundle_path=bundle.path, bundle_name=bundle.name)
        sync_bag_to_db(bag, bundle.name, bundle.version)
    (dag,) = dag_bag(Path(folder)).dags.values()
    moment = dag.start_date
    DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag)).create_dagrun(
        run_id="of-a-trial",
        logical_date=moment,
        run_after=moment,
        run_type=DagRunType.MANUAL,
        state=DagRunState.RUNNING,
        triggered_by=DagRunTriggeredByType.TEST,
        session=session,
    )
    session.commit()
    return 0


def work(folder):
    """Run the tasks of the DAG run until it ends, and clear it before if it failed; returns 0: it succeeded."""
    following._STAY_IN_WORKER_S, train.SETTLE_S = 0, 0  # noqa: SLF001 - each training is deferred, at once
    (dag,) = dag_bag(Path(folder)).dags.values()
    session = settings.Session()
    run = session.scalars(select(DagRun)).one()
    run.dag = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))
    if run.state == DagRunState.FAILED:
        run.dag.clear(run_id=run.run_id, dag_run_state=DagRunState.RUNNING, session=session)
    for left in run.get_task_instances(state=RUNS, session=session):
        left.task = run.dag.get_task(left.task_id)
        left.handle_failure("its worker is gone", session=session)
    session.commit()
    while run.state == DagRunState.RUNNING:
        session.expire_all()
        ready, _ = run.update_state(session=session)
        for instance in ready:
            instance.try_number += 1
            instance.state = TaskInstanceState.SCHEDULED
        session.commit()
        for instance in run.get_task_instances(session=session):
            if instance.state == TaskInstanceState.SCHEDULED:
                instance.set_state(TaskInstanceState.QUEUED, session=session)
                session.commit()
                run_task_in_process(ti=named(instance), task=dag.task_dict[instance.task_id])
            elif instance.state == TaskInstanceState.DEFERRED:
                follow(session.get(Trigger, instance.trigger_id), named(instance))
            session.expire_all()
    return int(run.state != DagRunState.SUCCESS)


def named(instance):
    return TaskInstance(
        id=UUID(str(instance.id)),
        task_id=instance.task_id,
        dag_id=instance.dag_id,
        run_id=instance.run_id,
        try_number=instance.try_number,
        map_index=instance.map_index,
        dag_version_id=UUID(str(instance.dag_version_id)),
    )


def follow(row, instance):
    number, trigger = row.id, import_string(row.classpath)(**row.kwargs)
    try:
        event = InProcessTestSupervisor.run_trigger_in_process(trigger=trigger, ti=instance)
    except Exception as error:  # noqa: BLE001 - as a triggerer does
        Trigger.submit_failure(number, error)
    else:
        Trigger.submit_event(number, event)
