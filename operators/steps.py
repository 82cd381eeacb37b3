"""The operators of all steps but ``train``: prepare, stage, build, export, cleanup and report."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manycpu.operators.airflow_versions import AirflowFailException, AirflowSkipException, conf
from manycpu.operators.base import RunOperator, demand_instance, failing_without_retry, require_begun
from manycpu.operators.following import keep_refusal, keep_report, place_of
from manycpu.pipeline.spec.errors import Finding, ManycpuError, NoReportError, raise_findings
from manycpu.pipeline.spec.handle import read_handle
from manycpu.pipeline.spec.tracking import place_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow.sdk import Asset, Context, XComArg

    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.targets.context import RunContext
    from manycpu.pipeline.verbs.export import Exported

_POD_PER_TASK = "KubernetesExecutor"  # starts a pod for each task, whose disk is deleted with the pod
_IN_POD = "AIRFLOW_IS_K8S_EXECUTOR_POD"  # the environment variable that KubernetesExecutor gives its pods
_EMPTY_DIR = "/kubernetes.io~empty-dir/"  # in the path of an emptyDir on its node
_MANY_MACHINES = ("CeleryExecutor", "EdgeExecutor")


class PrepareOperator(RunOperator):
    """Check the run against its target, and begin the record of what it owns. The setup of ``cleanup``."""

    def execute(self, context: Context) -> None:
        """Run preflight, log its warnings, and begin the ledger.

        Raises:
            AirflowFailException: Bad input; nothing was started.
        """
        try:
            with failing_without_retry():
                prepare_run(self.open(context), self.executor, self.log)
        except AirflowFailException as error:
            keep_refusal(error, place_of(context), self.log)
            raise


class StageDatasetOperator(RunOperator):
    """Copy the data set and the base model to the volume, verified; a retry resumes a broken copy."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Stage; returns where the data and the model are on every node, and their digests.

        Raises:
            AirflowFailException: Bad input.
            StageError: The source changed, cannot be read, or the disk is full.
        """
        from manycpu.pipeline.verbs.stage import stage

        with failing_without_retry():
            staged = stage(require_begun(self.open(context)), self.transfer_logger())
        for name, digest in staged.digests.items():
            self.log.info("%s: %s, manifest sha256 %s", name, getattr(staged, name), digest)
        return staged.model_dump(mode="json")


class BuildImageOperator(RunOperator):
    """Make a snapshot of the code, named by its content; on Kubernetes, push an image with it."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Build; returns the code's folder, or the image with its digest.

        Raises:
            AirflowFailException: Bad input, such as a program's folder that holds more than code.
            BuildError: The image cannot be built or pushed.
        """
        from manycpu.pipeline.verbs.build import build

        with failing_without_retry():
            built = build(require_begun(self.open(context)))
        self.log.info("%s, code sha256 %s", built.image or built.code or "code as installed", built.digest)
        return built.model_dump(mode="json")


class ExportModelOperator(RunOperator):
    """Copy the trained model to the run's output, and verify it.

    Args:
        handle: What ``train`` returned; it names the run.
        asset: The asset that the model is; its event carries the path, the digest and the metrics as extra.
        kwargs: ``run``, ``target``, and what every operator of Airflow takes.
    """

    template_fields = (*RunOperator.template_fields, "handle")

    def __init__(
        self,
        *,
        handle: Mapping[str, Any] | XComArg,
        asset: Asset | None = None,
        training: str | None = None,
        **kwargs: Any,
    ) -> None:
        outlets = [*kwargs.pop("outlets", ()), *([asset] if asset is not None else ())]
        super().__init__(training=training, outlets=outlets, **kwargs)
        self.handle = handle
        self.asset = asset

    def execute(self, context: Context) -> dict[str, Any]:
        """Export; returns the path, the number of files and bytes, the manifest's sha256 and the metrics.

        Raises:
            AirflowFailException: Bad input.
            ExportError: There is no model, or the copy at the output is incomplete.
        """
        from manycpu.pipeline.verbs.export import export

        with failing_without_retry():
            handle = read_handle(self.handle)
            exported = export(require_begun(self.open(context, handle.run)), handle, self.transfer_logger())
        if exported.path is None:
            self.log.info("run.output is null: there is no model to export")
        else:
            self.log.info("%s: %d files, manifest sha256 %s", exported.path, exported.files, exported.sha256)
        if self.asset is not None:
            set_asset_extra(self.asset, context, exported)
        return exported.model_dump(mode="json")


class CleanupOperator(RunOperator):
    """End what still runs, write the report, delete what the run owns. A teardown of ``prepare``."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Clean up; harmless when there is nothing to clean.

        Returns:
            The report without ``run.env``, if ``run.output`` is null: then there is no report.json that every
            worker can read. Otherwise an empty mapping, so that the next task finds an XCom.

        Raises:
            LaunchError: A process of the run does not end.
            LeftBehindError: Something was not deleted, and the next try of this task may delete it.
        """
        from manycpu.pipeline.verbs.cleanup import only_cleanup_is_left
        from manycpu.pipeline.verbs.report import left_behind_error

        with failing_without_retry():
            ctx = self.open(context)
            report = clean_up_and_log(ctx, self.log, place_of(context))
        # Fail only if the next try can find the run. If the ledger is deleted, it needs the report at the
        # output, and finds only a run that was exported: `only_cleanup_is_left` checks this.
        may_try_again = ctx.run.output is not None and has_tries_left(context)
        if report and report.left_behind and may_try_again and only_cleanup_is_left(ctx):
            raise left_behind_error(report.left_behind)
        if report is None or ctx.run.output is not None:
            return {}
        # Airflow masks values of variables and connections in logs, but not in XComs.
        return report.model_dump(mode="json", exclude={"run": {"env"}})


class ReportOperator(RunOperator):
    """Read report.json, and fail the DAG run if a step failed or left something behind.

    It is a teardown of ``prepare`` with ``on_failure_fail_dagrun``. Without it, a DAG run that a person marks
    failed while it trains would become a success, because Airflow skips every other task.

    Args:
        written: What ``cleanup`` returned: the report of a run whose ``output`` is null.
        trigger_rule: When the task runs, if it is no teardown: by default also after tasks that failed.
        kwargs: ``run``, ``target``, and what every operator of Airflow takes.
    """

    template_fields = (*RunOperator.template_fields, "written")

    def __init__(
        self,
        *,
        written: Mapping[str, Any] | XComArg | None = None,
        trigger_rule: str = "all_done",
        **kwargs: Any,
    ) -> None:
        super().__init__(trigger_rule=trigger_rule, **kwargs)
        self.written = written

    def execute(self, context: Context) -> str:
        """Raise the error that the report records; returns the path or URL of report.json.

        Raises:
            AirflowFailException: The run failed, was cancelled, or left something behind; with its error.
            AirflowSkipException: The training was skipped.
        """
        from manycpu.pipeline.run_report import Report
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

        with failing_without_retry():
            ctx = self.open(context)
        upstream_states = self._upstream_states(context)
        try:
            # `conclude` raises the error that the report records.
            report = conclude(Report.model_validate(self.written) if self.written else read_report(ctx))
        except NoReportError as error:
            was_skipped = any(
                issubclass(kind, PrepareOperator) and state == "skipped" for kind, _, state in upstream_states
            )
            if was_skipped:
                text = "the training was skipped: a branch before it chose another path"
                raise AirflowSkipException(text) from error
            raise AirflowFailException(str(error)) from error
        except ManycpuError as error:  # a retry would read the same report
            raise AirflowFailException(str(error)) from error
        for verb, record in report.verbs.items():
            self.log.info("%-8s %7.1f s  %s", verb, record.seconds, record.result)
        for name, value in report.metrics.items():
            self.log.info("%s: %s", name, value)
        for name, place in report.trackers.items():
            self.log.info("%s", place_in_words(name, place))
        path = report_path(ctx)
        # The report cannot show a step that Airflow itself ended. It may also be of an earlier try.
        if failed := [f"{task} is {state}" for _, task, state in upstream_states if state != "success"]:
            raise AirflowFailException(f"{path} records no failure, but {', '.join(failed)}")
        self.log.info("report: %s", path)
        return path

    def _upstream_states(self, context: Context) -> list[tuple[type, str, str]]:
        """List class, id and state of the upstream tasks that belong to the same training.

        Tasks without a state are left out. Empty if ``training`` is None: then this task has its own run.
        """
        own_tasks = dict[str, type]()  # task id -> class of the operator
        relatives: Any = self.get_flat_relatives(upstream=True) if self.training is not None else ()
        for task in relatives:
            # An expanded task is a MappedOperator, which keeps the class and the arguments of its tasks.
            fields = getattr(task, "partial_kwargs", None) or vars(task)
            kind = getattr(task, "operator_class", type(task))
            if issubclass(kind, RunOperator) and fields.get("training") == self.training:
                own_tasks[task.task_id] = kind
        if not own_tasks:
            return []
        instance: Any = context["ti"]
        run = {"dag_id": instance.dag_id, "run_ids": [instance.run_id]}
        by_run = instance.get_task_states(**run, map_index=instance.map_index, task_ids=[*own_tasks])
        states = by_run.get(instance.run_id, {})
        suffix = "" if instance.map_index < 0 else f"_{instance.map_index}"  # as Airflow's answer names tasks
        found = [(own_tasks[name], name, states.get(name + suffix)) for name in sorted(own_tasks)]
        return [(kind, name, state) for kind, name, state in found if state]


def prepare_run(ctx: RunContext, executor: str | None, log: Any) -> None:
    """Run preflight, log its warnings, and begin the ledger.

    ``executor`` is the name of the task's executor; None: the first one in Airflow's configuration.

    Raises:
        BadInputError: A check of preflight failed, or other Airflows may use the same target and this one has
            no unique name; nothing was started.
    """
    from manycpu.pipeline.targets.attempt import join
    from manycpu.pipeline.verbs.prepare import prepare

    if not ctx.ledger.exists():  # a run that an earlier version began ends as it began
        demand_instance(ctx.run.output, ctx.target.kind)
    local_findings = [*bundle_findings(ctx), *worker_disk_findings(ctx, executor)]
    raise_findings(local_findings)  # raises only if one is fatal
    for finding in [*local_findings, *prepare(ctx)]:
        log.warning("%s", finding)
    with ctx.ledger.update() as entry:
        join(ctx, entry, role="prepare")  # records that this task prepares the run
    log.info("run %s is ready, its folder is %s", ctx.name, ctx.where)


def worker_disk_findings(
    ctx: RunContext, executor: str | None, mounts: Path = Path("/proc/self/mountinfo")
) -> Iterator[Finding]:
    """Yield a finding for each folder of the run that is on this worker's root disk or an emptyDir.

    With an executor of many machines or pods, the next task may run elsewhere and not find the folder. Other
    executors have no findings. A finding is fatal if the disk is deleted with the task's pod.

    ``executor`` is the name of the task's executor; None: the first one in Airflow's configuration.
    ``mounts`` is the file that lists the mounts of this process.
    """
    name = executor or str(conf.get("core", "executor", fallback="")).split(",", maxsplit=1)[0]
    # A pod of KubernetesExecutor has LocalExecutor in its configuration, by the template of Airflow's chart.
    if _IN_POD in os.environ:
        name = _POD_PER_TASK
    if not any(kind in name for kind in (_POD_PER_TASK, *_MANY_MACHINES)):
        return
    danger = "is deleted with this task's pod" if _POD_PER_TASK in name else "the next worker may not see"
    for field, folder in _folders(ctx):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        # The same device as /: it is on no volume.
        if existing.stat().st_dev == Path("/").stat().st_dev or _is_empty_dir(existing.resolve(), mounts):
            yield Finding(
                field,
                f"{folder} is on the disk of this worker, which {danger} ({name})",
                "Give a folder on a volume that every worker mounts, or, for run.output, a URL",
                fatal=_POD_PER_TASK in name,
            )


def bundle_findings(ctx: RunContext) -> Iterator[Finding]:
    """Yield a finding for each folder of the run that is in Airflow's copy of a DAG bundle, as of one in git.

    Airflow deletes the copy of a commit when no task uses it any more. A relative path in a DAG leads there.
    """
    storage_path = conf.get("dag_processor", "dag_bundle_storage_path", fallback="")
    root = Path(storage_path or Path(tempfile.gettempdir(), "airflow", "dag_bundles"))  # as Airflow has it
    folders = [*_folders(ctx)]
    if ctx.run.checkpoints:
        folders.append(("run.checkpoints", Path(ctx.run.checkpoints)))
    for field, folder in folders:
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root)):
            yield Finding(
                field,
                f"{folder} is in Airflow's own copy of the DAGs, which Airflow deletes after some time",
                "Give an absolute path to another place, or, for run.output, a URL",
            )


def _folders(ctx: RunContext) -> Iterator[tuple[str, Path]]:
    """Yield field and path of each folder on this machine that must last as long as the run, or longer."""
    from manycpu.pipeline.adapters.storage import is_remote

    if home := ctx.driver.home(ctx):
        yield "target.directory", home
    # With run.output null, the next task gets the report as an XCom.
    if ctx.run.output is not None and not is_remote(ctx.run.output) and ctx.output.local:
        yield "run.output", ctx.output.local


def _is_empty_dir(folder: Path, mounts: Path) -> bool:
    """Whether a folder is on an emptyDir of its pod, which is deleted with the pod.

    ``mounts`` is a file like ``/proc/self/mountinfo``; without it the answer is False.
    """
    # A line, as in proc_pid_mountinfo(5): `id parent device mounted_folder point ... - type ...`. `point` is
    # the folder of this process at which `mounted_folder` of the file system appears.
    if not mounts.exists():  # only Linux has this file
        return False
    mounted = dict[str, bool]()  # where a file system is mounted -> whether it is an emptyDir
    for line in mounts.read_text(errors="replace").splitlines():
        mount, _, file_system = line.partition(" - ")
        mounted_folder, point = mount.split()[3:5]
        # An emptyDir with medium Memory is a tmpfs, which no two pods share.
        mounted[point] = _EMPTY_DIR in mounted_folder or file_system.startswith("tmpfs ")
    # The mount nearest to the folder counts.
    return next((mounted[str(path)] for path in (folder, *folder.parents) if str(path) in mounted), False)


def clean_up_and_log(
    ctx: RunContext, log: Any, place: Mapping[str, Any], attempt: int | None = None
) -> Report | None:
    """Run the verb cleanup, store the report for the training's page, and log what is left behind or kept.

    If an earlier try has cleaned up, its report is stored for the page again.

    Args:
        ctx: The run.
        log: The task's logger.
        place: The task whose page gets the report, as :func:`place_of` names it.
        attempt: If a later attempt than this one has begun, nothing is deleted. None: clean up in any case.

    Returns:
        The report; None: the run never began, is cleaned up already, or is needed by a later attempt.
    """
    from manycpu.pipeline.verbs.cleanup import cleanup
    from manycpu.pipeline.verbs.report import read_report

    report = cleanup(ctx, attempt=attempt, tell=partial(keep_report, place=place, log=log))
    if report is None:
        log.info("nothing to clean up")
        with suppress(ManycpuError):  # after an earlier try, whose XComs Airflow has deleted
            keep_report(read_report(ctx), place, log)
        return None
    for path in report.left_behind:
        log.error("left behind: %s", path)
    for path in report.kept:
        log.info("kept: %s", path)
    return report


def has_tries_left(context: Context) -> bool:
    """Whether the task's ``retries`` allow another try after this one."""
    instance: Any = context["ti"]
    return bool(instance.try_number <= instance.max_tries)


def set_asset_extra(asset: Asset, context: Context, exported: Exported) -> None:
    """Set the extra of an asset's event to the path, the digest and the metrics of the model."""
    fields = exported.model_dump(mode="json")
    context["outlet_events"][asset].extra = {name: fields[name] for name in ("path", "sha256", "metrics")}
