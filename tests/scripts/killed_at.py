"""Run `manycpu`, or a DAG, and kill it with SIGKILL at a change of the file system, or at one of its commands.

usage: killed_at.py PATTERN COUNT WORDS...: before the COUNT-th change that matches; a file that is opened to be
written is emptied first. WORDS are those of the command, or dag FOLDER DAG_ID WHEN.
"""

import os
import re
import signal
import sys
from datetime import datetime

from manycpu.pipeline.cli import main

_, pattern, left, *words = sys.argv
remaining, me = int(left), os.getpid()
WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "subprocess.Popen")


def see(event: str, args: tuple[object, ...]) -> None:
    global remaining  # noqa: PLW0603 - a hook has nothing else
    is_open = event == "open" and isinstance(args[0], str) and bool(int(str(args[2])) & WRITES)
    if os.getpid() != me or not (is_open or event in CHANGES):
        return
    if not re.search(pattern, f"{event} {' '.join(map(str, args))}"):
        return
    remaining -= 1
    if remaining == 0:
        if is_open:
            os.close(os.open(str(args[0]), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666))
        os.kill(me, signal.SIGKILL)


if words[0] == "dag":
    from manycpu.operators.airflow_versions import dag_bag

    _, folder, dag_id, moment = words
    when = datetime.fromisoformat(moment)
    dag = dag_bag(folder).dags[dag_id]
    sys.addaudithook(see)
    dag.test(run_after=when, logical_date=when)
else:
    sys.addaudithook(see)
    sys.argv = ["manycpu", *words]
    main()
