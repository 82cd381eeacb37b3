from tests.cluster.fixtures import *  # noqa: F403
