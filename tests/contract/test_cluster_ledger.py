"""The ledger on Kubernetes: whose clock its leases go by, and what becomes of a change that conflicts."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.fake_api_server import ApiServer

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.base import LEASE_S
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.spec.errors import ConflictError, ForeignRunError
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.open_run import open_context

DAY = 86_400.0  # seconds
ENTRY = Entry(key="k", name="qa", created=0, run={}, target={})
ME = process.handle_of_this_process(Path(), "qa", 0)
ELSEWHERE = ME.model_copy(update={"host": "another"})


@pytest.mark.parametrize("behind", [DAY, -DAY], ids=["a day behind", "a day ahead"])
def test_a_lease_goes_by_the_api_server_s_clock(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, behind: float
) -> None:
    def date(*_: object) -> str:
        return formatdate(time.time() + behind, usegmt=True)

    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", date)
    ledger = ConfigMapLedger(Cluster(server.connect, "ml"), "qa")
    ledger.open(ENTRY)
    until = ledger.lease().until
    assert until is not None
    assert abs(until - (time.time() + behind + LEASE_S)) < 600
    assert ledger.lease().held(ledger.now())


@pytest.fixture
def ledger(server: ApiServer) -> ConfigMapLedger:
    made = ConfigMapLedger(Cluster(server.connect, "ml"), "qa")
    made.open(ENTRY)
    return made


def test_a_run_is_not_taken_over_from_a_process_of_another_host_that_renewed_its_lease(
    server: ApiServer, ledger: ConfigMapLedger
) -> None:
    ledger.change_lease(holder=ELSEWHERE)
    another = ConfigMapLedger(Cluster(server.connect, "ml"), "qa")
    refused: list[Callable[[], object]] = [
        another.refuse_second_holder,
        lambda: another.open(ENTRY.model_copy(update={"created": 1.0})),
        lambda: another.change_lease(holder=ME),
    ]
    for act in refused:
        with pytest.raises(ForeignRunError, match="cancel qa --gone; or wait 30 minutes"):
            act()
    assert ledger.lease().holder == ELSEWHERE


@pytest.mark.parametrize(
    ("lease", "later"),
    [
        ({"holder": ELSEWHERE}, 1801),
        ({"holder": ELSEWHERE, "ended": True}, 0),  # a person said that it is gone
        ({"holder": ELSEWHERE, "renewed": None}, 0),  # of an earlier version
        ({"holder": None}, 0),  # tasks of Airflow, whose retry may be on any worker
    ],
    ids=["silent", "declared gone", "earlier version", "no holder"],
)
def test_a_run_is_taken_over_from_a_process_that_counts_as_gone(
    ledger: ConfigMapLedger, monkeypatch: pytest.MonkeyPatch, lease: dict[str, Any], later: float
) -> None:
    ledger.change_lease(**lease)
    now = time.time() + later
    monkeypatch.setattr(ledger, "now", lambda: now)
    ledger.refuse_second_holder()
    ledger.open(ENTRY.model_copy(update={"created": 1.0}))
    ledger.change_lease(holder=ME)
    assert ledger.lease().holder == ME


def test_of_two_processes_that_begin_a_run_at_the_same_moment_one_holds_it(
    server: ApiServer, ledger: ConfigMapLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(server.connect, "ml")
    late, patch = ConfigMapLedger(cluster, "qa"), cluster.patch

    def held_before(kind: str, name: str, body: KubeObject, **more: float) -> KubeObject:
        if ledger.lease().holder is None:
            ledger.change_lease(holder=ELSEWHERE)
        return patch(kind, name, body, **more)

    monkeypatch.setattr(cluster, "patch", held_before)
    with pytest.raises(ForeignRunError):
        late.change_lease(holder=ME)
    assert ledger.lease().holder == ELSEWHERE


def test_a_run_that_is_resumed_at_the_moment_of_its_removal_is_not_held(
    server: ApiServer, ledger: ConfigMapLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.keep(0)
    cluster = Cluster(server.connect, "ml")
    late, patch = ConfigMapLedger(cluster, "qa"), cluster.patch

    def resumed_before(kind: str, name: str, body: KubeObject, **more: float) -> KubeObject:
        if ledger.lease().ended:
            ledger.open(ENTRY.model_copy(update={"created": 1.0}))
        return patch(kind, name, body, **more)

    monkeypatch.setattr(cluster, "patch", resumed_before)
    with pytest.raises(ForeignRunError, match="another process"), late.held_by(ME, late.lease()):
        pytest.fail("the run is held")
    assert ledger.lease().holder is None


def test_a_process_that_removes_a_run_is_seen_from_other_hosts(ledger: ConfigMapLedger) -> None:
    ledger.keep(0)
    kept = ledger.lease()
    with ledger.held_by(ELSEWHERE, kept), pytest.raises(ForeignRunError, match="works on run qa"):
        ledger.open(ENTRY.model_copy(update={"created": 1.0}))
    assert ledger.lease() == kept


def test_a_refusal_of_a_second_process_names_where_the_run_is(server: ApiServer, tmp_path: Path) -> None:
    target = {"kind": "kubernetes", "namespace": "ml", "helper_image": "r/helper:1", "connection": "a config"}
    access = Access(connect=server.connect)
    run: dict[str, Any] = {"program": "question_answering", "output": None}
    ctx = open_context(run, target, "a", base=tmp_path, access=access)
    ctx.ledger.open(ctx.new_entry(0))
    ctx.ledger.change_lease(holder=ELSEWHERE)
    with pytest.raises(ForeignRunError, match="cancel qa --gone --namespace ml --connection 'a config';"):
        ctx.ledger.refuse_second_holder()


@pytest.mark.parametrize("claims", [False, True])
def test_a_change_that_conflicts_is_repeated_unless_it_claims_the_ledger(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, *, claims: bool
) -> None:
    cluster = Cluster(server.connect, "ml")
    ledger = ConfigMapLedger(cluster, "qa")
    ledger.open(ENTRY)
    patch, refused = cluster.patch, list[str]()

    def refuse_once(kind: str, name: str, body: KubeObject, **more: float) -> KubeObject:
        if not refused:
            refused.append(name)
            raise ConflictError("the object has been modified")
        return patch(kind, name, body, **more)

    monkeypatch.setattr(cluster, "patch", refuse_once)
    refused_once = pytest.raises(ConflictError) if claims else nullcontext()
    with refused_once, ledger.claim() if claims else ledger.update() as entry:
        entry.attempt = 3
    assert (refused, ledger.read().attempt) == (["qa"], 0 if claims else 3)
