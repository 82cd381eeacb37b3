"""The cluster, runs on it and an Airflow in it, for the long tests that need them."""

from cluster.fixtures import *  # noqa: F403 - fixtures
from support.cluster_runs import *  # noqa: F403 - fixtures
from support.deployed_airflow import deployed  # noqa: F401 - fixture
