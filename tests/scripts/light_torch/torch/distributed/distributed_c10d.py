"""The doors that the node watches."""

import os

_GROUPS = []


def init_process_group(backend=None):
    _GROUPS.append(backend or "gloo")


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
