"""torchrun for one rank: becomes it."""

import os
import sys

assert "--nproc-per-node=1" in sys.argv, "torch itself is needed for several ranks"
command = sys.argv[sys.argv.index("--no-python") + 1 :]
rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.execvpe(command[0], command, {**os.environ, **rank, "TORCHELASTIC_RUN_ID": "light"})  # noqa: S606
