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


def _wait_for_all():
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    store.add("group", 1)
    while store.add("group", 0) < get_world_size():
        time.sleep(0.01)


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
