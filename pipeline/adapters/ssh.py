"""Run commands on the hosts of a ``baremetal`` target over ssh, and copy folders there and back.

All calls are bounded in time:

- ``at_all(hosts, act)``: do something with every host at once.
- ``deliver(target, hosts, folder)``: copies a folder to every host that does not see it yet.
- ``make_folder``, ``remove_folder``: on every host.
- ``collect(target, hosts, folder)``: brings what the hosts have in a folder to this machine.
- ``run(target, host, argv)``: one command on one host; ``command(...)``: its arguments, for others to run.

A host may greet: what is read of a command's output begins behind a line of ours, whatever a banner or a
login shell printed before.
"""

import hashlib
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final, TypeVar

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.spec.errors import ExportError, LaunchError, StageError
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal

__all__ = ["at_all", "collect", "command", "deliver", "make_folder", "remove_folder", "run"]

_CONNECT: Final = 10  # seconds for a host to answer
_COMMAND: Final = 60.0  # seconds for a short command, a slow login included
_COPY: Final = 3600.0  # seconds for a folder
_UNREACHED: Final = 255  # what ssh exits with when the connection is at fault
_PARALLEL: Final = 16
_BEGIN: Final = "\n::manycpu-begin::\n"  # in front of what is read, and behind it
_END: Final = "\n::manycpu-end::\n"

Listing = dict[str, str]
"""Path of a file or link below a folder -> its sha256, or ``->`` and where it leads."""
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
) -> commands.Completed:
    """Run a command on a host; returns its exit code and what it printed.

    Raises:
        LaunchError: The host cannot be reached, or the command took longer than ``timeout`` seconds.
    """
    done = commands.run(command(target, host, argv), timeout=timeout, input=input)
    if done.code == _UNREACHED:
        raise LaunchError(
            f"host {host.name} cannot be reached by ssh; it said: {done.out.strip()[-500:] or 'nothing'}",
            field="target.hostfile",
            fix=f"See that `{shlex.join(target.ssh)} {host.name} true` works without a password, or take the "
            "host out of the hostfile",
        )
    return done


def at_all(hosts: Sequence[Host], do: Callable[[Host], T]) -> list[T]:
    """Call a function for every host, several at a time; the results are in the order of the hosts."""
    with ThreadPoolExecutor(max_workers=_PARALLEL, thread_name_prefix="ssh") as pool:
        return list(pool.map(do, hosts))


def make_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> None:
    """Make a folder on every host.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be made.
    """
    at_all(hosts, lambda host: _run_or_raise(target, host, ["mkdir", "-p", str(folder)]))


def remove_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Delete a folder on every host; returns what is still there, as ``host:folder``."""

    def remove(host: Host) -> list[str]:
        try:
            done = run(target, host, ["rm", "-rf", "--", str(folder)])
        except LaunchError:
            return [f"{host.name}:{folder}"]
        return [f"{host.name}:{folder}"] if done.code else []

    return [path for paths in at_all(hosts, remove) for path in paths]


def deliver(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Copy a folder to every host that does not see it yet; returns the names of those hosts.

    A host sees it when it has the same files of the same sha256 there: a shared folder, or an earlier copy.

    Raises:
        StageError: A copy failed, or is not what was sent; nothing half done is left under the name.
        LaunchError: A host cannot be reached.
    """
    expected = local_listing(folder)
    if not expected:
        make_folder(target, hosts, folder)
        return []

    def copy(host: Host) -> str | None:
        if _listing(target, host, folder) == expected:
            return None
        partial = f"{folder}.partial"
        quoted, arrived = shlex.quote(partial), shlex.quote(str(folder))
        unpack = f"rm -rf {quoted} && mkdir -p {quoted} && tar -C {quoted} -xf -"
        _stream(
            ["tar", "-C", str(folder), "-cf", "-", "."],
            command(target, host, ["sh", "-c", unpack]),
            host.name,
        )
        if _listing(target, host, Path(partial)) != expected:
            raise StageError(f"what arrived of {folder} on host {host.name} is not what was sent")
        _run_or_raise(target, host, ["sh", "-c", f"rm -rf {arrived} && mv -T {quoted} {arrived}"])
        return host.name

    return [name for name in at_all(hosts, copy) if name is not None]


def collect(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Copy a folder's files from the hosts to the same folder here; returns the names of those hosts.

    Nothing is deleted on a host, and nothing is brought where two have different files of one name.

    Raises:
        ExportError: Two hosts have different files of one name, or a host has no such folder.
        StageError: A copy failed, or is not what was sent.
        LaunchError: A host cannot be reached.
    """
    all_listings = dict(zip(hosts, at_all(hosts, lambda host: _listing(target, host, folder)), strict=True))
    for host, listing in all_listings.items():
        if listing is None:
            raise ExportError(f"host {host.name} has no folder {folder}", field="run.output")
    local = local_listing(folder)
    listings = {host: listing for host, listing in all_listings.items() if listing}
    _refuse_conflicts(
        {"this machine": local} | {f"host {h.name}": each for h, each in listings.items()}, folder
    )
    brought = []
    for host, listing in listings.items():
        if missing := listing.keys() - local.keys():
            _bring(target, host, folder, listing, missing)
            local |= listing
            brought.append(host.name)
    return brought


def _refuse_conflicts(listings: Mapping[str, Listing], folder: Path) -> None:
    first_seen: dict[str, tuple[str, str]] = {}
    for machine, listing in listings.items():
        for path, content in listing.items():
            first, other = first_seen.setdefault(path, (machine, content))
            if other != content:
                raise ExportError(
                    f"{first} and {machine} have different files {path}, each in {folder}, where all is kept",
                    field="run.output",
                    fix="Have one rank alone write it, or put the rank into its name; or rename it on one "
                    "host, and run again with the same run id",
                )


def _bring(target: BareMetal, host: Host, folder: Path, listing: Listing, missing: Iterable[str]) -> None:
    """Copy a folder of a host, and move the files that are missing here to their place."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pack = f"printf {shlex.quote(_BEGIN)} && exec tar -C {shlex.quote(str(folder))} -cf - ."
    _stream(
        command(target, host, ["sh", "-c", pack]),
        ["tar", "-C", str(partial), "-xf", "-"],
        host.name,
        behind=_BEGIN.encode(),
    )
    if local_listing(partial) != listing:
        raise StageError(f"what arrived of {folder} from host {host.name} is not what was sent")
    for path in missing:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (partial / path).rename(folder / path)
    shutil.rmtree(partial)


def local_listing(folder: Path) -> Listing:
    """List a folder of this machine as :func:`_listing` does on a host."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {path.relative_to(folder).as_posix(): _content(path) for path in files}


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"->{path.readlink()}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listing(target: BareMetal, host: Host, folder: Path) -> Listing | None:
    """List a folder on a host; None where there is none."""
    # Records end with NUL, so that any name can be told; of a link, where it leads comes first.
    files = "find . -type f -exec sha256sum -z {} + && find . -type l -printf '->%l\\0%p\\0'"
    steps = [f"cd {shlex.quote(str(folder))}", f"printf {shlex.quote(_BEGIN)}", files]
    listed = " && ".join([*steps, f"printf {shlex.quote(_END)}"])
    done = run(target, host, ["sh", "-c", listed], timeout=_COPY)
    _, begin, rest = done.out.partition(_BEGIN)
    text, end, _ = rest.rpartition(_END)
    if done.code or not begin or not end:
        return None
    records, listing = iter(text.split("\0")[:-1]), Listing()
    for record in records:
        content, path = (record, next(records)) if record.startswith("->") else record.split("  ", 1)
        listing[path.removeprefix("./")] = content
    return listing


def _run_or_raise(target: BareMetal, host: Host, argv: Sequence[str]) -> None:
    done = run(target, host, argv)
    if done.code:
        raise LaunchError(
            f"{shlex.join(argv)!r} failed on host {host.name}: {done.out.strip()[-500:]}",
            field="target.directory",
        )


def _stream(source: list[str], sink: list[str], host: str, behind: bytes = b"") -> None:
    """Pipe one command's output, from behind a marker on, into another command."""
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(source, bufsize=0, stdout=subprocess.PIPE, stderr=stderr) as sender,
    ):
        assert sender.stdout is not None  # noqa: S101 - for the type checker
        clock = threading.Timer(_COPY, sender.kill)
        clock.start()
        try:
            _skip(sender.stdout, behind)
            done = subprocess.run(sink, check=False, stdin=sender.stdout, capture_output=True, timeout=_COPY)
        except subprocess.TimeoutExpired as error:
            sender.kill()
            raise StageError(f"copying to or from host {host} took longer than {_COPY:g} s") from error
        finally:
            clock.cancel()
            sender.stdout.close()
        code = _exit_code(sender)
        stderr.seek(0)
        text = (stderr.read() + done.stderr).decode(errors="replace").strip()[-500:]
    if code or done.returncode:
        raise StageError(f"copying to or from host {host} failed: {text}")


def _skip(stream: IO[bytes], marker: bytes) -> None:
    """Read a stream to the end of a marker, and no byte further; to its end where there is no marker."""
    tail = b""
    while not tail.endswith(marker) and (byte := stream.read(1)):
        tail = (tail + byte)[-len(marker) :]


def _exit_code(sender: "subprocess.Popen[bytes]") -> int:
    """Wait for a process whose output nobody reads any more; kill it where it does not end."""
    try:
        return sender.wait(_COMMAND)
    except subprocess.TimeoutExpired:
        sender.kill()
        return sender.wait()
