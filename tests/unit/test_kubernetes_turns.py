"""Whose turn it is: in a namespace whose scheduler places pods at random, and whose followers look late."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.api_objects import T0, Object, at

from manycpu.pipeline.spec.job_kinds import MPIJOB, PYTORCHJOB, JobKind
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import Note
from manycpu.pipeline.targets.kubernetes.following.turns import Turns, job_of, patch

NO_ROOM = "0/2 nodes are available: 2 Insufficient cpu."


REPLICAS = {"PyTorchJob": "pytorchReplicaSpecs", "MPIJob": "mpiReplicaSpecs"}


@dataclass
class Run:
    """A run of a simulated namespace: pods of one CPU each on nodes of so many."""

    name: str
    born: float
    nodes: int = 2
    cpu: int = 1
    seconds: int = 20
    followed: bool = True
    kind: JobKind = PYTORCHJOB
    launchers: int = 0
    """Pods without ranks, which ask for a CPU as well."""
    namespace: str = "ml"
    suspended: bool = False
    note: Note | None = None
    pods: list[float | None] = field(default_factory=list)
    """When each got its node; None: it has none."""
    began: float = 0.0
    ended: float = 0.0
    turns: Turns = field(default_factory=Turns)
    acts: int = 0

    def job(self) -> Object:
        change: Any = patch(self.kind, self.note, "1") if self.note else {"metadata": {}}
        container = {"resources": {"requests": {"cpu": str(self.cpu)}}}
        worker = {"replicas": self.nodes, "template": {"spec": {"containers": [container]}}}
        meta = {"name": f"{self.name}-1", "uid": self.name, "creationTimestamp": at(self.born)}
        labels = {"manycpu/run": self.name, "manycpu/attempt": "1"}
        done = [{"type": "Succeeded", "status": "True"}] if self.ended else []
        return {
            "metadata": {**change["metadata"], **meta, "labels": labels},
            "spec": {"runPolicy": {"suspend": self.suspended}, REPLICAS[self.kind.kind]: {"Worker": worker}},
            "status": {"conditions": done},
        }

    def seen_pods(self) -> list[Object]:
        labels = {"manycpu/run": self.name, "manycpu/attempt": "1", "manycpu/role": "rank"}
        return [
            self._pod(number, placed, labels | ({"manycpu/role": "launcher"} if number >= self.nodes else {}))
            for number, placed in enumerate(self.pods)
        ]

    def _pod(self, number: int, placed: float | None, labels: dict[str, str]) -> Object:
        yes = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(placed or 0)}
        no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}
        return {
            "metadata": {"name": f"{self.name}-{number}", "uid": f"{self.name}-{number}", "labels": labels}
            | {"creationTimestamp": at(self.born)},
            "spec": {"containers": []},
            "status": {
                "phase": "Succeeded" if self.ended else "Pending",
                "conditions": [no if placed is None else yes],
            },
        }


Seen = tuple[dict[str, list[Object]], dict[str, tuple[bool, Note | None]]]
"""The jobs and pods of a namespace, and the state of each run by its name."""


class Namespace:
    """Runs, and a cluster that has room for so many CPUs; time passes in seconds."""

    def __init__(self, room: int, runs: list[Run], seed: int = 0) -> None:
        self.room, self.runs, self.now = room, runs, 0.0
        self._random = random.Random(seed)  # noqa: S311

    def run_out(self, seconds: int) -> None:
        while self.now < seconds and not all(run.ended or not run.followed for run in self.runs):
            self.step()

    def step(self) -> None:
        self.now += 1
        for run in self._alive():
            if run.began and self.now - run.began >= run.seconds:
                run.ended = self.now
        before = self._seen()
        self._operate()
        self._schedule()
        for run in self._alive():
            if run.followed and self._random.random() < 0.7:  # who looks now, and who later
                seen = self._seen() if self._random.random() < 0.5 else before
                self._follow(run, *seen[run.namespace])

    def used(self) -> int:
        return sum(run.cpu for run in self._alive() for placed in run.pods if placed is not None)

    def _alive(self) -> list[Run]:
        return [run for run in self.runs if run.born <= self.now and not run.ended]

    def _operate(self) -> None:
        for run in self._alive():
            if run.suspended:
                run.pods = []
            elif not run.pods:
                run.pods = [None] * (run.nodes + run.launchers)

    def _schedule(self) -> None:
        waiting = [(run, n) for run in self._alive() for n, placed in enumerate(run.pods) if placed is None]
        self._random.shuffle(waiting)
        for run, number in waiting:
            if self.used() + run.cpu <= self.room:
                run.pods[number] = self.now
        for run in self._alive():
            if run.pods and None not in run.pods and not run.began:
                run.began = self.now

    def _seen(self) -> dict[str, "Seen"]:
        return {name: self._seen_in(name) for name in {run.namespace for run in self.runs}}

    def _seen_in(self, namespace: str) -> "Seen":
        runs = [run for run in self.runs if run.namespace == namespace]
        objects: dict[str, list[Object]] = {"PyTorchJob": [], "MPIJob": []}
        objects["Pod"] = [pod for run in runs if run.born <= self.now for pod in run.seen_pods()]
        for run in self._alive():
            if run in runs:
                objects[run.kind.kind].append(run.job())
        return objects, {run.name: (run.suspended, run.note) for run in runs}

    def _follow(self, run: Run, objects: dict[str, list[Object]], versions: dict[str, Any]) -> None:
        found = next((job for job in objects[run.kind.kind] if job["metadata"]["uid"] == run.name), None)
        if found is None or run.began:
            return
        pods = [pod for pod in objects["Pod"] if pod["metadata"]["labels"]["manycpu/run"] == run.name]
        mine = job_of(found, run.kind, pods, T0 + self.now)
        if mine is None:
            return
        run.turns.update(objects, T0 + self.now)
        decision = run.turns.decide(mine, T0 + self.now)
        if decision is None:
            return
        job, note = decision
        other = next(one for one in self.runs if one.name == job.run)
        if versions[other.name] != (other.suspended, other.note):
            return  # the API refuses the patch of a stale decision
        run.acts += 1
        other.suspended, other.note = not note.resumed, note


def names(runs: Iterable[Run]) -> list[str]:
    return [run.name for run in sorted(runs, key=lambda run: run.began)]


def alike(count: int, apart: float = 0.0, **more: Any) -> list[Run]:
    return [Run(f"run-{number}", born=number * apart, **more) for number in range(count)]


seeds = pytest.mark.parametrize("seed", range(4))


@seeds
@pytest.mark.parametrize("apart", [0.0, 1.0, 7.0])
def test_six_that_are_alike_finish_two_by_two_in_the_order_in_which_they_came(
    seed: int, apart: float
) -> None:
    namespace = Namespace(4, runs := alike(6, apart), seed)
    for run in runs[1::2]:
        run.kind = MPIJOB
    namespace.run_out(300)
    assert all(run.ended for run in runs)
    began = names(runs)
    first = ["run-0", "run-1"] if apart else began[:2]  # of those that come at once, whom the scheduler likes
    assert sorted(began[:2]) == sorted(first)
    after = sorted(set(began) - set(first))
    assert [set(began[2:4]), set(began[4:])] == [set(after[:2]), set(after[2:])]
    assert max(run.acts for run in runs) <= 6


@seeds
def test_what_fits_runs_though_an_older_one_does_not(seed: int) -> None:
    large, *small = [Run("large", 0, nodes=5), *(Run(f"small-{n}", n, nodes=1) for n in (1, 2, 3))]
    namespace = Namespace(4, [large, *small], seed)
    namespace.run_out(300)
    assert all(run.ended for run in small)
    assert large.acts <= 8
    assert not large.ended


@seeds
def test_a_large_one_has_its_turn_when_the_small_ones_before_it_are_done(seed: int) -> None:
    runs = [Run("a", 0, nodes=1), Run("b", 0, nodes=1), Run("large", 1, nodes=4), Run("c", 2, nodes=3)]
    Namespace(4, runs, seed).run_out(400)
    assert all(run.ended for run in runs)


@seeds
def test_a_run_that_nobody_follows_does_not_block_the_others_for_ever(seed: int) -> None:
    runs = [Run("lost", 0, nodes=3, followed=False), *(Run(f"run-{n}", 1, nodes=2) for n in range(3))]
    Namespace(3, [Run("first", 0, nodes=1, seconds=10), *runs], seed).run_out(600)
    assert all(run.ended for run in runs[1:])


@seeds
def test_any_mixture_ends_and_nothing_spins(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    runs = [
        Run(f"run-{n}", chance.randrange(60), nodes=chance.randint(1, 4), cpu=chance.randint(1, 2))
        for n in range(12)
    ]
    for run in runs[::3]:
        run.kind = MPIJOB
    namespace = Namespace(8, runs, seed)
    namespace.run_out(3000)
    assert all(run.ended for run in runs)
    assert max(run.acts for run in runs) <= 40
    work = sum(run.nodes * run.cpu * run.seconds for run in runs)
    assert namespace.now < 60 + 3 * work / namespace.room + 200


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("namespaces", [("ml", "ml"), ("ml", "others")])
def test_two_whose_workers_hold_what_their_launchers_wait_for_both_end(
    seed: int, namespaces: tuple[str, str]
) -> None:
    runs = [
        Run(f"run-{number}", 0, nodes=2, launchers=1, kind=MPIJOB, namespace=name)
        for number, name in enumerate(namespaces)
    ]
    Namespace(4, runs, seed).run_out(1500)
    assert all(run.ended for run in runs)
    assert max(run.acts for run in runs) <= 12


@pytest.mark.parametrize("seed", range(20))
def test_four_of_four_namespaces_that_hold_a_part_each_all_end(seed: int) -> None:
    runs = [Run(f"run-{number}", number, nodes=3, namespace=f"n-{number}") for number in range(4)]
    Namespace(5, runs, seed).run_out(3000)
    assert all(run.ended for run in runs)
    assert max(run.acts for run in runs) <= 30


@seeds
def test_what_a_dead_follower_holds_in_vain_is_given_back_for_it(seed: int) -> None:
    lost = Run("lost", 5, nodes=4, followed=False)
    runs = [Run("long", 0, nodes=1, seconds=5000), lost, Run("next", 20, nodes=2)]
    namespace = Namespace(4, runs, seed)
    namespace.run_out(1500)
    assert runs[2].ended
    assert lost.suspended


@seeds
def test_a_dead_follower_behind_a_living_run_that_cannot_start_is_skipped(seed: int) -> None:
    runs = [Run("huge", 0, nodes=10), Run("lost", 1, nodes=2, followed=False), Run("next", 2, nodes=2)]
    runs[1].suspended, runs[1].note = True, Note(at=T0, short=("cpu",), due=T0)
    namespace = Namespace(4, runs, seed)
    namespace.run_out(3000)
    assert runs[2].ended


def test_a_run_that_waits_for_a_claim_does_not_hold_up_those_without_it() -> None:
    older = Run("older", 0, suspended=True, note=Note(at=T0, claim="data", due=T0 + 600, rests=T0))
    waiting = Run("next", 1, pods=[5.0, None])
    mine = job_of(waiting.job(), PYTORCHJOB, waiting.seen_pods(), T0 + 20)
    assert mine is not None
    assert mine.refused
    turns = Turns()
    holder = Run("other", 0, pods=[5.0]).seen_pods()
    holder[0]["spec"]["volumes"] = [{"persistentVolumeClaim": {"claimName": "data"}}]
    turns.update({"PyTorchJob": [older.job(), waiting.job()], "Pod": holder + waiting.seen_pods()}, T0 + 20)
    assert turns.waits_for(mine).endswith("held by run other")
    assert turns.decide(mine, T0 + 20) is None


def test_the_times_grow_with_the_tries_and_stop_at_six_minutes() -> None:
    pauses = []
    for tries in (0, 1, 5000):
        run = Run("run", 0, pods=[5.0, None], note=Note(at=T0, tries=tries, resumed=T0 + 1))
        mine = job_of(run.job(), PYTORCHJOB, run.seen_pods(), T0 + 2000)
        assert mine is not None
        decision = Turns().decide(mine, T0 + 2000)
        assert decision is not None
        pauses.append(decision[1].due - T0 - 2000)
    assert 30 <= pauses[0] <= 90
    assert 60 <= pauses[1] <= 180
    assert 180 <= pauses[2] <= 540
