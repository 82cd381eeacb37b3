"""Start the ranks of a job as its mpirun does, each on a host of its own: pod_mpirun.py HOST,HOST -m MODULE WORDS...

If one fails, the others are ended.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

hosts = sys.argv[1].split(",")
world = {"PMI_SIZE": str(len(hosts)), "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
argv = [sys.executable, str(Path(__file__).with_name("pod_rank.py"))]
ranks = [
    subprocess.Popen([*argv, host, *sys.argv[2:]], env=os.environ | world | {"PMI_RANK": str(number)})
    for number, host in enumerate(hosts)
]
failed = 0
for _ in hosts:
    _, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code and not failed:
        failed = code
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGTERM)
sys.exit(failed)
