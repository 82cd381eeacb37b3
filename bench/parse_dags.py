"""Parsing dags/ against a DAG file that imports only airflow.sdk: CPU time of fresh processes, by turns."""

import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench._measure import rounds
from manycpu.operators import local_airflow

LIMIT = 1.15
BARE = """
from airflow.sdk import dag, task

@dag(schedule=None)
def bare():
    @task
    def nothing(): ...
    nothing()

bare()
"""
PARSE = "import runpy, sys; [runpy.run_path(file) for file in sys.argv[1:]]"
WORDS = {
    "title": "Parsing DAG files",
    "meaning": "DAG files that use manycpu are parsed nearly as fast as those that import Airflow alone.",
    "figures": {
        "bare_seconds": ("Processor time to parse a file that imports Airflow alone", "s", ""),
        "dags_seconds": ("Processor time to parse all files of dags/", "s", ""),
        "ratio": ("The second is so many times the first", "x", "at most [limit]"),
    },
}


def main() -> dict[str, float]:
    """Measure; the ratio is the median of pairs that ran one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare.py")
        bare.write_text(BARE)
        env = os.environ | local_airflow.settings(Path(folder))
        ours = sorted(str(path) for path in local_airflow.DAGS.glob("*.py"))
        for files in ([str(bare)], ours):
            _seconds(files, env)  # the first time is for the disk
        pairs = [(_seconds([str(bare)], env), _seconds(ours, env)) for _ in range(rounds(7, 2))]
    return {
        "bare_seconds": round(statistics.median(bare_seconds for bare_seconds, _ in pairs), 3),
        "dags_seconds": round(statistics.median(dag_seconds for _, dag_seconds in pairs), 3),
        "ratio": round(
            statistics.median(dag_seconds / bare_seconds for bare_seconds, dag_seconds in pairs), 3
        ),
        "limit": LIMIT,
    }


def _seconds(files: list[str], env: dict[str, str]) -> float:
    """CPU seconds of a process that runs DAG files as Airflow's parser does."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", PARSE, *files], env)
    _, status, used = os.wait4(pid, 0)
    if status != 0:
        sys.exit(f"bench: {' '.join(files)} cannot be parsed")
    return used.ru_utime + used.ru_stime
