"""Build the backend ahead: ``python -m manycpu.pipeline.node.ccl``."""

import sys

from manycpu.pipeline.node.backends import UnavailableError
from manycpu.pipeline.node.ccl import build
from manycpu.pipeline.spec.exit_records import EXIT_BACKEND


def main() -> int:
    """Build the backend, and load it once; returns 88 if that is not possible."""
    try:
        version = build.load().version()
    except UnavailableError as error:
        sys.stderr.write(f"manycpu: ccl is not available: {error.args[0]}\n")
        return EXIT_BACKEND
    sys.stdout.write(f"{build.built()} (oneCCL {'.'.join(map(str, version))})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
