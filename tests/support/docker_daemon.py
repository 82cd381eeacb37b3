"""A docker daemon for tests, in its own namespaces, and busybox as a shell for the images that it builds.

Debian's packages are unpacked and never installed, so no service starts. The daemon's mounts, processes and
network end with its first process. The daemon writes only to its own folder.
"""

import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from cluster import cgroups, debian
from cluster.command import MissingError, tail
from support.waiting import until

_CLIENT = {"trixie": ("docker-cli", "docker-buildx")}  # in earlier releases, docker.io contains the client
_PLUGINS = ("usr/libexec/docker/cli-plugins", "usr/lib/docker/cli-plugins")
# dockerd writes its key to /etc, containerd's folder to /opt and sockets to /run: the namespace has its own.
_FIRST_PROCESS = """
mount -t tmpfs tmpfs /run
for folder in etc opt; do
    mkdir /run/$folder /run/$folder.work
    mount -t overlay -o lowerdir=/$folder,upperdir=/run/$folder,workdir=/run/$folder.work overlay /$folder
done
ip link set lo up
dockerd "$@"
"""
_LISTEN = """
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
socket.send_fds(socket.socket(fileno=0), [b"."], [listening.fileno()])
"""


def ensure() -> None:
    """Unpack docker and busybox; skip the test if the packages are not available."""
    try:
        debian.ensure()
        packages = ("busybox-static", "docker.io", "libdevmapper1.02.1", *_CLIENT.get(debian.release(), ()))
        debian.ensure(packages, "docker")
    except MissingError as error:
        pytest.skip(f"no docker here: {error}")


def busybox() -> Path:
    """Return the path of busybox, a static shell."""
    ensure()
    return debian.program("busybox", "docker")


def client() -> Path:
    """Return the folder with the program `docker`."""
    ensure()
    return debian.program("docker", "docker").parent


def plugins() -> list[str]:
    """Return the folders with the plugins of docker's client."""
    return [str(debian.unpacked("docker") / folder) for folder in _PLUGINS]


@contextmanager
def running(folder: Path, registry: str) -> Iterator[str]:
    """Run a daemon until the block ends; yield the value of DOCKER_HOST for clients. Needs root.

    Args:
        folder: The folder for all files of the daemon.
        registry: host:port of a registry on this machine's loopback, which the daemon gets at that address.
    """
    if os.geteuid() != 0:
        pytest.skip("a docker daemon needs root")
    ensure()
    group = f"manycpu-{folder.name}"
    host = f"unix://{folder}/docker.sock"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(_command(folder, host, group), env=_env(), stdout=log, stderr=log)
    try:
        until(lambda: process.poll() is not None or _answers(host))
        assert process.poll() is None, tail((folder / "log").read_text())
        (first,) = psutil.Process(process.pid).children()
        with _reachable(registry, first.pid):
            yield host
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()  # ends the whole namespace
        process.wait(300)
        _remove_groups(group)


def _command(folder: Path, host: str, group: str) -> list[str]:
    """Return the command that runs dockerd in namespaces of its own; ``group`` is its folder of cgroups."""
    apart = ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child"]
    options = {
        "host": host,
        "data-root": folder / "data",
        "exec-root": folder / "exec",
        "pidfile": folder / "pid",
        "config-file": folder / "daemon.json",
        "cgroup-parent": f"/{group}",
        "exec-opt": "native.cgroupdriver=cgroupfs",
        "storage-driver": "vfs",
        "iptables": "false",
        "ip6tables": "false",
        "ip-forward": "false",
    }
    (folder / "daemon.json").write_text("{}")
    words = [f"--{name}={value}" for name, value in options.items()]
    # The daemon ends when the test process is killed.
    ends = ["setpriv", "--pdeathsig", "KILL"]
    return [*ends, "unshare", *apart, "--propagation", "private", "sh", "-ec", _FIRST_PROCESS, "sh", *words]


def _env() -> dict[str, str]:
    """Return the environment in which unpacked programs find each other and their libraries."""
    mine, theirs = debian.unpacked("docker"), debian.unpacked()
    programs = [f"{root}/usr/{folder}" for root in (mine, theirs) for folder in ("sbin", "bin")]
    libraries = [f"{mine}/{folder}/x86_64-linux-gnu" for folder in ("lib", "usr/lib")]
    return {
        "PATH": ":".join((*programs, os.environ["PATH"])),
        "LD_LIBRARY_PATH": ":".join(libraries),
    }


def _answers(host: str) -> bool:
    asked = [str(client() / "docker"), "--host", host, "version"]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


def _remove_groups(group: str) -> None:
    """Remove the daemon's cgroups, innermost first."""
    for hierarchy in cgroups.hierarchies():
        folders = [path for path in (hierarchy / group).rglob("*") if path.is_dir()]
        for folder in (*sorted(folders, reverse=True), hierarchy / group):
            with suppress(FileNotFoundError):
                folder.rmdir()


@contextmanager
def _reachable(registry: str, pid: int) -> Iterator[None]:
    """Let process ``pid`` reach the registry from its own network namespace.

    A program in that namespace opens a listening socket at the registry's address, and passes it to this
    process, which relays each connection to the registry.
    """
    address, _, port = registry.partition(":")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-I", "-c", _LISTEN, port]
        subprocess.run(command, stdin=theirs.fileno(), check=True)
        _, (listening,), _, _ = socket.recv_fds(ours, 1, 1)

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((address, int(port))) as there:
                back = threading.Thread(target=_pump, args=(there, self.request))
                back.start()
                _pump(self.request, there)
                back.join()

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay, bind_and_activate=False)
    server.daemon_threads = True  # the threads end with the daemon, which keeps connections open
    server.socket.close()
    server.socket = socket.socket(fileno=listening)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes from one socket to another until the first one ends."""
    with suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
        target.shutdown(socket.SHUT_WR)
