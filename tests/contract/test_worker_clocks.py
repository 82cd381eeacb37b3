"""Leases on Kubernetes go by the API server's clock, whatever the worker's shows."""

import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
from support.fake_api_server import ApiServer

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.base import LEASE_S
from manycpu.pipeline.ledger.configmap import ConfigMapLedger

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
