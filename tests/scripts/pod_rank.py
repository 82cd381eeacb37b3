"""Run a module as the rank of a pod does, on a host of its own: pod_rank.py HOSTNAME -m MODULE WORDS..."""

import runpy
import socket
import sys

hostname, _, module, *sys.argv[1:] = sys.argv[1:]
socket.gethostname = lambda: hostname
runpy.run_module(module, run_name="__main__", alter_sys=True)
