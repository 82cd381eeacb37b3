"""Choose where the ranks of one machine meet: a port that is taken before anybody knows of it."""

import os
import socket

__all__ = ["listen"]


def listen() -> socket.socket:
    """Listen on a free port of this machine, and name it in the environment as torch expects.

    Whoever becomes rank 0 serves its store on this very socket, so that no other program can take the port in
    between; ranks that connect before that wait for it.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    return listener
