"""The namespaces that hold the whole cluster, and how programs are started and stopped in them.

`init.py` is process 1 of these namespaces. When it is killed, the kernel ends all other processes in them.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from cluster.command import ClusterError, run, tail, wait_for
from cluster.settings import HERE, INNER, run_folder

INIT = HERE / "init.py"


@dataclass(frozen=True)
class Namespace:
    """The namespaces of one running cluster.

    Attributes:
        pid: process id of the cluster's process 1, as the machine sees it.
    """

    pid: int

    def command(self, *words: str | Path, node: str | None = None) -> list[str | Path]:
        """Return the command line that runs `words` inside the cluster, or with the mounts of one node."""
        inside = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--uts", "--ipc", "--"]
        if node:
            inside += ["nsenter", f"--mount=/proc/{self.process(node_holder(node))}/ns/mnt", "--"]
        return [*inside, *words]

    def run(self, *words: str | Path, node: str | None = None, seconds: float = 60) -> str:
        return run(self.command(*words, node=node), seconds=seconds)

    def process(self, name: str) -> int:
        """Return the process id, inside the cluster, of the program that was started under this name."""
        return int((run_folder() / "pids" / name).read_text())

    def start(
        self,
        name: str,
        words: Sequence[str | Path],
        *,
        node: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start a program in the background; its output goes to logs/NAME.log in the run folder.

        It does not use the temporary folder of the test session, because it may outlive the session.
        """
        script = f'echo $$ >{INNER}/pids/{name}; exec "$@" >>{INNER}/logs/{name}.log 2>&1 </dev/null'
        settings = [f"{key}={value}" for key, value in (env or {}).items()]
        # setsid --fork: the program becomes a child of the cluster's process 1.
        own = ("env", "--unset=TMPDIR", *settings)
        self.run("setsid", "--fork", *own, "sh", "-c", script, name, *words, node=node)
        wait_for(f"{name} to start", (run_folder() / "pids" / name).exists, seconds=10, every=0.02)

    def alive(self, name: str) -> bool:
        """Return whether the process exists, even if it is ending: it may still hold its ports."""
        try:
            self.run("test", "-e", f"/proc/{self.process(name)}")
        except (ClusterError, FileNotFoundError):
            return False
        return True

    def signal(self, name: str, number: signal.Signals) -> None:
        self.run("kill", f"-{number.value}", str(self.process(name)))

    def stop(self, name: str, *, seconds: float = 20) -> None:
        """Stop a background program: send SIGTERM, and SIGKILL if it has not ended after a time."""
        if self.alive(name):
            self.signal(name, signal.SIGTERM)
            try:
                wait_for(f"{name} to end", lambda: not self.alive(name), seconds=seconds, every=0.05)
            except ClusterError:
                self.kill(name)
        (run_folder() / "pids" / name).unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Kill a background program and wait until it has ended."""
        self.signal(name, signal.SIGKILL)
        wait_for(f"{name} to be killed", lambda: not self.alive(name), seconds=30, every=0.05)
        (run_folder() / "pids" / name).unlink(missing_ok=True)

    def log(self, name: str, lines: int = 30) -> str:
        file = run_folder() / "logs" / f"{name}.log"
        return tail(file.read_text(errors="replace"), lines) if file.exists() else "(no log)"


def node_holder(node: str) -> str:
    """Return the name of the process that holds a node's mount namespace open."""
    return f"{node}-mounts"


def find() -> Namespace | None:
    """Return the running cluster of this cache folder, whichever process started it; None: none runs."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_init = words[-1:] == [str(run_folder())] and Path(words[-2]).name == INIT.name
        if is_init and Path(words[0]).name != "unshare":
            return Namespace(process.pid)
    return None


def create() -> Namespace:
    """Start process 1 in new namespaces."""
    folder = run_folder()
    for name in ("pids", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    log = folder / "logs" / "init.log"
    unshare = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--uts", "--ipc", "--fork"]
    script = 'exec "$@" >"$0" 2>&1 </dev/null'
    run(
        [
            "setsid",
            "--fork",
            "sh",
            "-c",
            script,
            log,
            *unshare,
            "--mount-proc",
            sys.executable,
            "-I",
            INIT,
            folder,
        ]
    )
    try:
        wait_for("the cluster's process 1", (folder / "ready").exists, seconds=20)
        namespace = find()
    except ClusterError as error:
        raise ClusterError(f"{error}\n{log.read_text()}") from None
    if namespace is None:
        raise ClusterError(f"the cluster's process 1 ended at once:\n{log.read_text()}")
    return namespace


def end(namespace: Namespace) -> None:
    """Kill process 1: the kernel ends all other processes. Return when the last one is gone."""
    members = _members(namespace)
    psutil.Process(namespace.pid).kill()
    _, alive = psutil.wait_procs(members, timeout=30)
    if alive:
        raise ClusterError(f"these processes of the cluster do not end: {alive}")


def processes(namespace: Namespace) -> list[psutil.Process]:
    """Return every process of the cluster, including those of pods."""
    return _members(namespace)


def _members(namespace: Namespace) -> list[psutil.Process]:
    first = psutil.Process(namespace.pid)
    return [first, *first.children(recursive=True)]
