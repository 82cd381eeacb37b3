"""Command line of the test cluster: `python -m cluster up`, `down` or `status`.

`make cluster` and `make cluster-down` call it.
"""

import argparse
import logging
import sys

from cluster import cluster
from cluster.command import ClusterError


def _up() -> int:
    there = cluster.running()
    started = cluster.up()
    print("already running" if there else "started")  # noqa: T201
    print(cluster.describe(started))  # noqa: T201
    return 0


def _down() -> int:
    print("ended" if cluster.down() else "no cluster was running")  # noqa: T201
    return 0


def _status() -> int:
    there = cluster.running()
    print(cluster.describe(there) if there else "no cluster is running")  # noqa: T201
    return 0 if there else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="show every command that is run")
    parser.add_argument("do", choices=("up", "down", "status"))
    options = parser.parse_args()
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(relativeCreated)7.0f ms  %(message)s", stream=sys.stderr)
    logging.getLogger("urllib3").setLevel(logging.WARNING)
    try:
        return {"up": _up, "down": _down, "status": _status}[options.do]()
    except ClusterError as error:
        sys.stderr.write(f"cluster: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
