"""The faults of a campaign on the test cluster.

Each fault is a function that causes it. It returns the evidence that the fault struck; empty: it did not,
because the command had ended, or the thing that it strikes was not found.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Literal, NamedTuple

import psutil
from cluster.command import ClusterError
from cluster.faults import Faults
from cluster.space import JOBS
from kubernetes import client
from kubernetes.client import ApiException
from support.campaign_judge import BOUND_S
from support.campaign_users import HERE, THERE, Command, User, pods_of
from support.waiting import until

from manycpu.pipeline.spec.job_kinds import JOB_KINDS

Cause = Callable[[User, Command], str]


class Fault(NamedTuple):
    """A fault of a campaign."""

    cause: Cause
    scope: Literal["run", "command", "all", "nothing"]
    """What it may harm: the run that meets it, only the command of that run, all runs, or no run."""
    kinds: tuple[str, ...] = (*HERE, *THERE)
    """Kinds of run that can meet it."""
    strikes_all: bool = False
    """Whether it strikes the whole cluster, and so all runs."""


def _for_all(cause: Cause, scope: Literal["all", "nothing"] = "all") -> Fault:
    return Fault(cause, scope, THERE, strikes_all=True)


def _signalled(number: signal.Signals) -> Cause:
    """Return a fault that sends a signal to the command; it strikes unless the command ends with success."""

    def cause(_: User, command: Command) -> str:
        command.program.send_signal(number)
        command.wait(BOUND_S)
        code = command.program.returncode
        return f"it ended with {code}" if code else ""

    return cause


def _kill_and_clean(user: User, command: Command) -> str:
    struck = _signalled(signal.SIGKILL)(user, command)
    return struck and user.other("clean", "--yes")


def _stop(user: User, command: Command) -> str:
    return _stopped(command, lambda: command.wait(user.rng.choice((4, 15))))


def _stop_beside_another(user: User, command: Command) -> str:
    second = user.type("beside a stopped one")
    struck = _stopped(command, lambda: second.wait(user.rng.choice((8, 20))))
    second.end()
    return struck


def _stopped(command: Command, meanwhile: Callable[[], object]) -> str:
    """Stop the command's process while ``meanwhile`` runs, and let it continue then."""
    process = psutil.Process(command.program.pid)
    process.suspend()
    try:
        meanwhile()
        return f"it was {process.status()}" if process.status() == psutil.STATUS_STOPPED else ""
    finally:
        process.resume()


def _begin_another(user: User, command: Command) -> str:
    second = user.type("beside another")
    user.see_name(second)
    struck = "" if command.ended or second.ended else "both ran"
    second.end()
    return struck


def _clean(user: User, command: Command) -> str:
    said = user.other("clean", "--yes")
    return "" if command.ended else said


def _cancel(user: User, command: Command) -> str:
    run = user.see_name(command)
    return user.other("cancel", run) if run and not command.ended else ""


def _kill_a_rank(user: User, command: Command) -> str:
    """Kill one of the ranks, as soon as there are any; nothing happens if the command ends before."""
    while not (ranks := list(_ranks(user))) and not command.wait(0.5):
        pass
    if not ranks:
        return ""
    rank = user.rng.choice(ranks)
    with suppress(psutil.NoSuchProcess):
        rank.kill()
        return f"process {rank.pid} of {len(ranks)}"
    return ""


def _ranks(user: User) -> Iterator[psutil.Process]:
    """Yield the ranks: processes with the user's arguments, without a child, and with more than one thread.

    A rank posts beats from a thread. Launchers have the same arguments, but they have children.
    """
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            is_of_user = {user.at.url, user.name} <= {*process.cmdline()}
            if is_of_user and not process.children() and process.num_threads() > 1:
                yield process


def _at_a_pod(role: str, act: Callable[[User, client.V1Pod], str], phase: str = "") -> Cause:
    """Return a fault that calls ``act`` with one of the run's pods, as soon as there is one.

    ``role`` is a label selector below ``manycpu/``. ``phase`` is the phase of the pod; empty: any.
    """

    def cause(user: User, command: Command) -> str:
        run = user.see_name(command)

        def pods() -> list[client.V1Pod]:
            return [pod for pod in pods_of(user, run, role) if phase in ("", pod.status.phase)]

        until(lambda: command.ended or pods())
        if not (found := pods()) or command.ended:
            return ""
        with suppress(ApiException, ClusterError):
            return act(user, user.rng.choice(found))
        return ""

    return cause


def _delete_a_pod(role: str, **options: Any) -> Cause:
    def act(user: User, pod: client.V1Pod) -> str:
        told, core = pod.metadata, client.CoreV1Api(user.at.space.admin)
        body = {"preconditions": {"uid": told.uid}}
        core.delete_namespaced_pod(told.name, told.namespace, body=body, **options)
        return f"{told.name} was deleted"

    return _at_a_pod(role, act)


def _kill_a_container(user: User, pod: client.V1Pod) -> str:
    user.at.faults.kill_container(user.at.space, pod.metadata.name)
    return f"that of {pod.metadata.name}"


def _jobs_of(user: User, run: str) -> list[tuple[str, str]]:
    """List kind and name of the jobs of a run."""
    objects, found = client.CustomObjectsApi(user.at.space.admin), list[tuple[str, str]]()
    for kind, (group, version, plural) in JOBS.items():
        where = (group, version, user.at.space.name, plural)
        items = objects.list_namespaced_custom_object(*where, label_selector=f"manycpu/run={run}")["items"]
        found += [(kind, item["metadata"]["name"]) for item in items]
    return found


def _at_its_job(act: Callable[[User, Command, str, str], str]) -> Cause:
    def cause(user: User, command: Command) -> str:
        run = user.see_name(command)
        until(lambda: command.ended or _jobs_of(user, run))
        if not (found := _jobs_of(user, run)) or command.ended:
            return ""
        with suppress(ApiException):
            return act(user, command, *found[0])
        return ""

    return cause


def _delete_job(user: User, _: Command, kind: str, name: str) -> str:
    group, version, plural = JOBS[kind]
    objects = client.CustomObjectsApi(user.at.space.admin)
    objects.delete_namespaced_custom_object(group, version, user.at.space.name, plural, name)
    return f"{name} was deleted"


def _suspend_job(user: User, command: Command, kind: str, name: str) -> str:
    """Suspend a job until its pods are gone, and resume it; do nothing if no pod is active."""

    def active() -> bool:
        phases = {pod.status.phase for pod in pods_of(user, command.name, "role")}
        return bool(phases & {"Pending", "Running"})

    if not active():
        return ""
    _set_suspended(user, kind, name, suspended=True)
    until(lambda: command.ended or not active())
    struck = "" if command.ended else f"{name} had no pods"
    _set_suspended(user, kind, name, suspended=False)
    return struck


def _set_suspended(user: User, kind: str, name: str, *, suspended: bool) -> None:
    group, version, plural = JOBS[kind]
    body = JOB_KINDS[kind.lower()].with_suspend(suspended)
    objects = client.CustomObjectsApi(user.at.space.admin)
    objects.patch_namespaced_custom_object(group, version, user.at.space.name, plural, name, body)


def _frozen(*programs: str, seconds: tuple[int, ...]) -> Cause:
    """Return a fault that stops one of the cluster's programs for one of these times."""

    def cause(user: User, command: Command) -> str:
        program = user.rng.choice(programs)
        return _while(user, command, user.at.faults.frozen(program), seconds) and program

    return cause


def _of_cluster(
    evidence: str, seconds: tuple[int, ...], begin: Callable[[Faults], AbstractContextManager[Any]]
) -> Cause:
    """Return a fault that lasts as long as the context manager of ``begin``, for one of these times."""

    def cause(user: User, command: Command) -> str:
        return _while(user, command, begin(user.at.faults), seconds) and evidence

    return cause


def _while(user: User, command: Command, fault: AbstractContextManager[Any], seconds: tuple[int, ...]) -> str:
    """Cause a fault of the whole cluster for one of these times, or until the command has ended."""
    with user.at.one_for_all:
        if command.ended:
            return ""
        with fault as found:
            command.wait(user.rng.choice(seconds))
            frozen = {one.status() for one in found or ()}
        return "it was so" if frozen <= {psutil.STATUS_STOPPED} else ""


def _delete_a_bystander(user: User, command: Command) -> str:
    if not user.see_name(command) or not user.decoys:
        return ""
    name = next(one for one in user.decoys if one.startswith("Pod/"))
    client.CoreV1Api(user.at.space.admin).delete_namespaced_pod(name.removeprefix("Pod/"), user.at.space.name)
    user.at.history.add("deleted by a fault", object=name)
    return "" if command.ended else f"{name} was deleted"


def _change_a_config(user: User, command: Command) -> str:
    if not user.see_name(command) or not user.decoys:
        return ""
    name = next(one for one in user.decoys if one.startswith("ConfigMap/")).removeprefix("ConfigMap/")
    core = client.CoreV1Api(user.at.space.admin)
    core.patch_namespaced_config_map(name, user.at.space.name, {"data": {"changed": "yes"}})
    return "" if command.ended else f"{name} was changed"


_OPERATORS: Final = ("training-operator.v1", "mpi-operator", "trainer-controller-manager", "jobset")
_SUSPENDED: Final = tuple(kind for kind in THERE if kind != "intel")
"""Kinds whose job can be suspended at any time: an MPIJob cannot once its launcher pod has begun."""
FAULTS: Final[Mapping[str, Fault]] = {
    "command killed": Fault(_signalled(signal.SIGKILL), "command"),
    "command terminated": Fault(_signalled(signal.SIGTERM), "run"),
    "command interrupted": Fault(_signalled(signal.SIGINT), "run"),
    "command killed, then clean": Fault(_kill_and_clean, "run"),
    "command stopped for a while": Fault(_stop, "nothing"),
    "command stopped beside another": Fault(_stop_beside_another, "nothing"),
    "another command beside": Fault(_begin_another, "nothing"),
    "clean beside": Fault(_clean, "nothing"),
    "cancel beside": Fault(_cancel, "run"),
    "rank killed": Fault(_kill_a_rank, "run"),
    "pod of the job deleted": Fault(_delete_a_pod("role"), "run", THERE),
    "container killed": Fault(_at_a_pod("role", _kill_a_container, "Running"), "run", THERE),
    "helper pod deleted": Fault(_delete_a_pod("verb,!manycpu/role", grace_period_seconds=0), "run", THERE),
    "job deleted": Fault(_at_its_job(_delete_job), "run", THERE),
    "job suspended": Fault(_at_its_job(_suspend_job), "run", _SUSPENDED),
    "API server frozen": _for_all(_frozen("kube-apiserver", seconds=(5, 20))),
    "API server killed": _for_all(_of_cluster("it was away", (2, 15), Faults.api_away)),
    "API server slow": _for_all(_of_cluster("it was slow", (20,), lambda of: of.api_slow(2)), "nothing"),
    "etcd frozen": _for_all(_frozen("server", seconds=(5, 15))),
    "controller manager frozen": _for_all(_frozen("kube-controller-manager", seconds=(15,))),
    "operator frozen": _for_all(_frozen(*_OPERATORS, seconds=(8, 20))),
    "kubelet frozen": _for_all(
        _of_cluster("that of node-b", (8, 20), lambda of: of.kubelet_frozen("node-b"))
    ),
    "node drained": _for_all(_of_cluster("node-b", (2, 15), lambda of: of.drained("node-b"))),
    "pods cut off": _for_all(_of_cluster("those of node-b", (8, 20), lambda of: of.pods_cut_off("node-b"))),
    "volumes full": _for_all(_of_cluster("all of them", (8, 20), Faults.volumes_full)),
    "bystander's pod deleted": Fault(_delete_a_bystander, "nothing", THERE),
    "unrelated ConfigMap changed": Fault(_change_a_config, "nothing", THERE),
}
