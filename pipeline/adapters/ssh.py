"""The hosts of a ``baremetal`` target, over ssh.

What the verbs call, all bounded in time, and at all hosts at once:

- ``check(target, run, mpi)``: findings for preflight.
- ``placement(target, run)``: the fields of a Placement that depend on the hosts.
- ``deliver(target, hosts, folder)``: copies a folder to every host that does not see it yet.
- ``make_folder``, ``remove_folder``: on every host.
- ``collect(target, host, folder)``: brings a folder from one host to this machine.
- ``run(target, host, argv)``: one command on one host.
"""

import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec.errors import LaunchError, StageError
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal

__all__ = ["at_all", "collect", "command", "deliver", "make_folder", "remove_folder", "run"]

_CONNECT: Final = 10  # seconds for a host to answer
_COMMAND: Final = 60.0  # seconds for a short command, a slow login included
_COPY: Final = 3600.0  # seconds for a folder
_UNREACHED: Final = 255  # what ssh exits with when the connection is at fault
_PARALLEL: Final = 16

T = TypeVar("T")


def command(target: BareMetal, host: Host, argv: Sequence[str]) -> list[str]:
    """Build the arguments that run a command on a host; the user's own ssh options win."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"]
    return [*target.ssh, *options, host.name, shlex.join(argv)]


def run(
    target: BareMetal,
    host: Host,
    argv: Sequence[str],
    *,
    timeout: float = _COMMAND,
    input: bytes | None = None,  # noqa: A002 - the name that subprocess gives it
) -> process.Completed:
    """Run a command on a host; its exit code and what it printed.

    Raises:
        LaunchError: The host cannot be reached, or the command took longer than ``timeout`` seconds.
    """
    done = process.run(command(target, host, argv), timeout=timeout, input=input)
    if done.code == _UNREACHED:
        raise LaunchError(
            f"host {host.name} cannot be reached by ssh; it said: {done.out.strip()[-500:] or 'nothing'}",
            field="target.hostfile",
            fix=f"See that `{shlex.join(target.ssh)} {host.name} true` works without a password, or take the "
            "host out of the hostfile",
        )
    return done


def at_all(hosts: Sequence[Host], do: Callable[[Host], T]) -> list[T]:
    """Do the same at every host, several at a time; the results in the order of the hosts."""
    with ThreadPoolExecutor(max_workers=_PARALLEL, thread_name_prefix="ssh") as pool:
        return list(pool.map(do, hosts))


def make_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> None:
    """Make a folder on every host.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be made.
    """
    at_all(hosts, lambda host: _must(target, host, ["mkdir", "-p", str(folder)]))


def remove_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Delete a folder on every host; what is still there, as ``host:folder``."""

    def remove(host: Host) -> list[str]:
        try:
            done = run(target, host, ["rm", "-rf", "--", str(folder)])
        except LaunchError:
            return [f"{host.name}:{folder}"]
        return [f"{host.name}:{folder}"] if done.code else []

    return [left for found in at_all(hosts, remove) for left in found]


def deliver(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Copy a folder to every host that does not see it yet; the names of those that did not.

    A host sees it when it has the same files of the same sha256 there: a shared folder, or an earlier copy.

    Raises:
        StageError: A copy failed, or is not what was sent; nothing half done is left under the name.
        LaunchError: A host cannot be reached.
    """
    wanted = listing_here(folder)
    if not wanted:
        make_folder(target, hosts, folder)
        return []

    def copy(host: Host) -> str | None:
        if _listing(target, host, folder) == wanted:
            return None
        partial = f"{folder}.partial"
        quoted, arrived = shlex.quote(partial), shlex.quote(str(folder))
        unpack = f"rm -rf {quoted} && mkdir -p {quoted} && tar -C {quoted} -xf -"
        _stream(
            ["tar", "-C", str(folder), "-cf", "-", "."],
            command(target, host, ["sh", "-c", unpack]),
            host.name,
        )
        if _listing(target, host, Path(partial)) != wanted:
            raise StageError(f"what arrived of {folder} on host {host.name} is not what was sent")
        _must(target, host, ["sh", "-c", f"rm -rf {arrived} && mv -T {quoted} {arrived}"])
        return host.name

    return [name for name in at_all(hosts, copy) if name is not None]


def collect(target: BareMetal, host: Host, folder: Path) -> bool:
    """Bring a folder from a host to the same place here; False where it was here already (shared).

    Raises:
        StageError: The copy failed, or is not what was sent.
        LaunchError: The host cannot be reached.
    """
    there = _listing(target, host, folder)
    if not there:
        raise StageError(f"host {host.name} has no folder {folder}")
    if folder.is_dir() and listing_here(folder) == there:
        return False
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _stream(
        command(target, host, ["tar", "-C", str(folder), "-cf", "-", "."]),
        ["tar", "-C", str(partial), "-xf", "-"],
        host.name,
    )
    if listing_here(partial) != there:
        raise StageError(f"what arrived of {folder} from host {host.name} is not what was sent")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return True


def listing_here(folder: Path) -> str:
    """List a folder of this machine as :func:`_listing` does on a host: the sha256 and path of each file."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return "".join(sorted(f"{_sha256(path)}  ./{path.relative_to(folder).as_posix()}\n" for path in files))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listing(target: BareMetal, host: Host, folder: Path) -> str:
    """List a folder on a host, "" where there is none; an empty folder is as good as none."""
    listed = f"cd {shlex.quote(str(folder))} && find . -type f -exec sha256sum {{}} +"
    done = run(target, host, ["sh", "-c", listed], timeout=_COPY)
    return "".join(sorted(done.out.splitlines(keepends=True))) if done.code == 0 else ""


def _must(target: BareMetal, host: Host, argv: Sequence[str]) -> None:
    done = run(target, host, argv)
    if done.code:
        raise LaunchError(
            f"{shlex.join(argv)!r} failed on host {host.name}: {done.out.strip()[-500:]}",
            field="target.directory",
        )


def _stream(source: list[str], sink: list[str], host: str) -> None:
    """Send what one command prints to another's stdin."""
    with subprocess.Popen(source, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        try:
            done: Any = subprocess.run(
                sink, check=False, stdin=sender.stdout, capture_output=True, timeout=_COPY
            )
        except subprocess.TimeoutExpired as error:
            sender.kill()
            raise StageError(f"copying to or from host {host} took longer than {_COPY:g} s") from error
        said = _last_words(sender)
    if sender.returncode or done.returncode:
        text = (said + done.stderr).decode(errors="replace").strip()[-500:]
        raise StageError(f"copying to or from host {host} failed: {text}")


def _last_words(sender: "subprocess.Popen[bytes]") -> bytes:
    """Wait for what has nobody left to send to, and hear what it said."""
    if sender.stdout is not None:
        sender.stdout.close()
    try:
        return sender.communicate(timeout=_COMMAND)[1]
    except subprocess.TimeoutExpired as error:
        sender.kill()
        return error.stderr or b"it did not end"
