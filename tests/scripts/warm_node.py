"""Run the node, over and over, from a process that has imported the modules that are named: each rank is a fork.

Reads a request from each line of stdin, as JSON: the node's `argv`, `env` and `folder`, where `out` and `err` go.
Answers with a line: the node's exit code.
"""

import faulthandler
import gc
import importlib
import json
import os
import sys
from pathlib import Path

from manycpu.pipeline.node.__main__ import main


def begin(argv, env, folder):
    """Become the node's process: its output goes to files, and its environment is the one that is asked for."""
    os.environ.clear()
    os.environ.update(env)
    os.environ.setdefault("LD_PRELOAD", "")  # else the node would replace this process to preload libraries
    for stream, name in ((0, os.devnull), (1, Path(folder, "out")), (2, Path(folder, "err"))):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, stream)
        os.close(opened)
    faulthandler.enable()  # a rank that gets SIGABRT prints where it was
    sys.argv[1:] = argv
    sys.exit(main(argv))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # else the garbage collector of each fork writes to, and so copies, all that was imported
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            begin(**json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
