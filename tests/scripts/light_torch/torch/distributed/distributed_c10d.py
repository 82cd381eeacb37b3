"""The doors that the node watches."""

import os
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed.store import DistError, TCPStore

_GROUPS = []


def init_process_group(backend=None):
    _GROUPS.append(backend or "gloo")
    if get_world_size() > 1:
        with suppress(DistError):  # rank 0, which serves, may leave when all have come
            _wait_for_all()


def all_reduce(tensor):
    """Add up the first numbers of all ranks, once in a program; rank 0, which serves, waits for the others."""
    if get_world_size() > 1:
        _store().add("sum", tensor[0])
        _wait_for_all("added")
        tensor[0] = _store().add("sum", 0)
        with suppress(DistError):
            _wait_for_all("read")


def destroy_process_group():
    _GROUPS.clear()


def _wait_for_all(what="group"):
    store = _store()
    store.add(what, 1)
    while store.add(what, 0) < get_world_size():
        time.sleep(0.01)


def _store():
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))


def is_initialized():
    return bool(_GROUPS)


def get_backend_config():
    return _GROUPS[-1]


def get_rank():
    return int(os.environ["RANK"])


def get_world_size():
    return int(os.environ["WORLD_SIZE"])


def _new_process_group_helper():
    raise NotImplementedError
