"""The ledger on Kubernetes: whose clock its leases go by, and what becomes of a change that conflicts."""

import time
from contextlib import nullcontext
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
from support.fake_api_server import ApiServer

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.base import LEASE_S
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.spec.errors import ConflictError
from manycpu.pipeline.spec.kube_object import KubeObject

DAY = 86_400.0  # seconds


@pytest.mark.parametrize("behind", [DAY, -DAY], ids=["a day behind", "a day ahead"])
def test_a_lease_goes_by_the_api_server_s_clock(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, behind: float
) -> None:
    def date(*_: object) -> str:
        return formatdate(time.time() + behind, usegmt=True)

    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", date)
    ledger = ConfigMapLedger(Cluster(server.connect, "ml"), "qa")
    ledger.open(Entry(key="k", name="qa", created=0, run={}, target={}))
    until = ledger.lease().until
    assert until is not None
    assert abs(until - (time.time() + behind + LEASE_S)) < 600
    assert ledger.lease().held(ledger.now())


@pytest.mark.parametrize("claims", [False, True])
def test_a_change_that_conflicts_is_repeated_unless_it_claims_the_ledger(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, *, claims: bool
) -> None:
    cluster = Cluster(server.connect, "ml")
    ledger = ConfigMapLedger(cluster, "qa")
    ledger.open(Entry(key="k", name="qa", created=0, run={}, target={}))
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
