from cluster.fixtures import *  # noqa: F403
