"""The cluster, runs on it, an Airflow in it and an S3 server beside it, for the long tests that need them."""

from collections.abc import Iterator

import pytest
from cluster import settings
from cluster.fixtures import *  # noqa: F403 - fixtures
from cluster.fixtures import TestCluster
from support import s3_server
from support.cluster_runs import *  # noqa: F403 - fixtures
from support.deployed_airflow import deployed  # noqa: F401 - fixture
from support.s3_server import Server


@pytest.fixture
def server(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run an S3 server that pods reach; this process has no login for it."""
    if cluster.own is None:
        pytest.skip("pods of another cluster do not reach a server on this machine")
    with s3_server.running(tmp_path_factory.mktemp("s3"), address=settings.MACHINE_ADDRESS) as running:
        yield running
