"""Run `manycpu`, or a DAG, and cause a fault where it changes a file, or starts or ends a process.

usage: fault_at.py FAULT PATTERN COUNT WORDS...: at the COUNT-th change that matches. WORDS are those of the
command, or dag FOLDER DAG_ID WHEN, or tasks FOLDER, as dag_runs.py has it. FAULT is one of:

    kill        SIGKILL before the change
    kill-begun  the same, after the file was opened (and emptied, where it is), or the process was started
    short       the file that is opened takes ten bytes; the error after them is EFBIG, which the kernel gives
    power       SIGKILL before the change; of files that it wrote and did not sync, all bytes become zero
    ENOSPC, EIO, EACCES, EAGAIN and so on: the change fails with this error
    ahead, back the clock jumps by three days

usage: fault_at.py serve machines|kubernetes|airflow: the same for each line of stdin, a JSON of {fault, count, words,
env, folder, log, seconds, ahead_s}, in a child that has imported everything for such a target; prints its exit
code. SIGALRM ends it after so many seconds. What it prints comes to log, and the changes to log.changes, one in
a line. Its clock is ahead by ahead_s.

Python's audit events show the changes: the product needs no hooks. Changes of its children do not count.
"""

import errno
import gc
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OF_OS = "rename remove mkdir rmdir link symlink chmod chown utime truncate kill"
CHANGES = {f"os.{name}" for name in OF_OS.split()}
DAYS = {"ahead": 3, "back": -3}
UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


def is_change(event, args):
    path = args[0] if args else None
    if event == "open":
        is_path = isinstance(path, str | os.PathLike) and not os.fspath(path).startswith("/proc/")
        return is_path and bool(args[2] & WRITES) and (os.path.isfile(path) or not os.path.exists(path))
    if event == "os.mkdir":
        return not os.path.exists(path)
    if event in ("os.utime", "os.remove"):
        return isinstance(path, int) or args[-1] != -1 or os.path.lexists(path)
    return event == "subprocess.Popen" or (event in CHANGES and (event != "os.kill" or args[1] != 0))


class Unsynced:
    """The files that this process has written, and that a loss of power destroys."""

    def __init__(self):
        from manycpu.pipeline.adapters import disk

        self.paths, sync_file, sync_all = set(), os.fsync, disk.sync

        def fsync(descriptor):
            sync_file(descriptor)
            written = os.fstat(descriptor)
            self.paths = {path for path in self.paths if not self.is_file(path, written)}

        def sync(folder):
            sync_all(folder)
            self.paths.clear()

        os.fsync, disk.sync = fsync, sync

    @staticmethod
    def is_file(path, status):
        return os.path.exists(path) and os.path.samestat(os.stat(path), status)

    def note(self, event, args):
        if event == "open" and not args[2] & os.O_APPEND:  # logs: others write to them too
            self.paths.add(os.path.abspath(os.fsdecode(args[0])))
        elif event == "os.rename":
            before, after = (os.path.abspath(os.fsdecode(path)) for path in args[:2])
            inside = {path for path in self.paths if path == before or path.startswith(f"{before}/")}
            self.paths = self.paths - inside - {after} | {after + path[len(before) :] for path in inside}

    def lose(self):
        for path in filter(os.path.isfile, self.paths):
            status = os.stat(path)
            Path(path).write_bytes(bytes(status.st_size))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class Fault:
    """The hook that counts changes, and causes the fault; those that the log has already count too."""

    def __init__(self, fault, pattern, count, log=os.devnull):
        self.fault, self.pattern, self.log = fault, pattern, log
        self.left = int(count) - (Path(log).read_bytes().count(b"\n") if os.path.isfile(log) else 0)
        self.process, self.starts = os.getpid(), False
        self.unsynced = Unsynced() if fault == "power" else None
        start = subprocess.Popen.__init__

        def started(popen, *args, **options):
            start(popen, *args, **options)
            if self.starts:
                self.kill()

        subprocess.Popen.__init__ = started
        sys.addaudithook(self.see)

    def see(self, event, args):
        # Last: the arguments of other events may be equal to everything, or have no end.
        if os.getpid() != self.process or not is_change(event, args) or self.log in args:
            return
        line = " ".join(map(str, (event, *args[:2]))).replace("\n", " ")
        if re.search(self.pattern, line):
            self.left -= 1
            if self.left == -1 and self.fault == "short":
                resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)
            with open(self.log, "a") as log:  # each time: a supervisor closes all files
                log.write(f"{line[:300]}\n")
            if self.left == 0:
                self.cause(event, args)
        if self.unsynced:
            self.unsynced.note(event, args)

    def cause(self, event, args):
        if self.fault == "short":
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, UNLIMITED[1]))
        elif self.fault in DAYS:
            set_clock(DAYS[self.fault] * 86_400)
        elif self.unsynced:
            self.process = 0  # what follows is no change of the command
            self.unsynced.lose()
            os.kill(os.getpid(), signal.SIGKILL)
        elif not self.fault.startswith("kill"):
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number), str(args[0]))
        elif self.fault == "kill-begun" and event == "subprocess.Popen":
            self.starts = True
        else:
            if self.fault == "kill-begun" and event == "open":
                with suppress(OSError):
                    os.open(args[0], args[2], 0o666)
            self.kill()

    def kill(self):
        os.kill(self.process, signal.SIGKILL)


def run(words):
    if words[0] == "dag":
        from manycpu.operators.airflow_versions import dag_bag

        _, folder, dag_id, moment = words
        when = datetime.fromisoformat(moment)
        dag = dag_bag(folder).dags[dag_id]
        dag.test(run_after=when, logical_date=when)
    elif words[0] in ("begin", "tasks"):
        import dag_runs

        sys.exit({"begin": dag_runs.begin, "tasks": dag_runs.work}[words[0]](words[1]))
    else:
        from manycpu.pipeline.cli import main

        sys.argv = ["manycpu", *words]
        main()


def set_clock(ahead_s):
    right = time.time
    time.time = lambda: right() + ahead_s


def serve(target):
    answers = os.dup(1)
    os.dup2(2, 1)  # what is imported may print warnings
    importlib.import_module("manycpu.pipeline.cli")
    if target == "airflow":
        importlib.import_module("dag_runs").warm_up()
    for one in ("machines", "kubernetes") if target == "airflow" else (target,):
        importlib.import_module(f"manycpu.pipeline.targets.{one}.driver")
    if target != "machines":
        importlib.import_module("manycpu.pipeline.targets.kubernetes.image.layers").library()
    gc.freeze()  # else the garbage collector of each fork writes to, and so copies, all that was imported
    for line in sys.stdin:
        given = json.loads(line)
        if child := os.fork():
            os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        for number in (1, 2):
            os.dup2(os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.setsid()
        os.chdir(given["folder"])
        os.environ.update(given["env"])
        signal.alarm(given["seconds"])
        set_clock(given["ahead_s"])
        changes = given["log"] + ".changes"
        with suppress(FileNotFoundError):
            os.remove(changes)
        Fault(given["fault"], "", given["count"], changes)
        run(given["words"])
        return


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        Fault(*sys.argv[1:4])
        run(sys.argv[4:])
