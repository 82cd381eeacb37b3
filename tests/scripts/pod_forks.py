"""Run the program of helper pods in forks of this process, which has imported it: it begins at once.

Each message on the socket that is stdin is a JSON of {words, fault, count, log}, the last three as in
fault_at.py; all programs share the log. It has four descriptors: stdin, stdout and stderr of the program, and a
pipe for its process id and its exit code, one in a line.
"""

import gc
import json
import os
import signal
import socket
import sys
from functools import partial

from fault_at import Fault

from manycpu.pipeline.pod import __main__ as program
from manycpu.pipeline.pod import commands, direct  # noqa: F401 - imported once, before the forks

# A program that is killed leaves its lease: the next one would wait half a minute for a sign of life.
commands.leased = partial(commands.leased, beat=0.5, stale=5)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.freeze()  # forks then leave alone what they share
asked = socket.socket(fileno=os.dup(0))
while True:
    message, descriptors, *_ = socket.recv_fds(asked, 4096, 4)
    if not message:
        break
    if os.fork() == 0:
        asked.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *streams, told = descriptors
        if child := os.fork():
            for stream in streams:
                os.close(stream)
            os.write(told, f"{child}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(told, f"{code}\n".encode())
            os._exit(0)
        os.close(told)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        given = json.loads(message)
        sys.argv[1:] = given["words"]
        Fault(given["fault"], "", given["count"], given["log"])
        sys.exit(program.main(sys.argv[1]))
    for descriptor in descriptors:
        os.close(descriptor)
