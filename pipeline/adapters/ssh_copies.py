"""Copy folders to the hosts of a ``baremetal`` target, and back.

- ``deliver(target, hosts, delivery, in_use)``: copy a folder to every host that does not have it yet.
- ``collect(target, hosts, folder)``: copy the hosts' files of a folder to this machine.

Runs share delivered folders. Each run records its use on the host, as a folder ``uses/<kind>/<name>`` in its
own folder; a folder in use is neither replaced nor deleted. The host holds a lock beside the folder while a
use is recorded and while a folder is moved into place, but not during a copy.
"""

import hashlib
import logging
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import IO, Final, NamedTuple

from manycpu.pipeline.adapters import ssh
from manycpu.pipeline.adapters.commands import Completed
from manycpu.pipeline.adapters.listing import below
from manycpu.pipeline.adapters.storage import open_file
from manycpu.pipeline.spec.errors import ExportError, StageError, recordable
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.spec.words import first_of

_LOG: Final = logging.getLogger(__name__)
_TRIES: Final = 5  # other runs may deliver the same folder first
_END_TIMEOUT_S: Final = 60.0  # of a process whose output is read to the end
_BLOCK_BYTES: Final = 1 << 20
_HASHED_BYTES_PER_S: Final = 10 << 20  # at least, also on slow disks

# Defines users(), which prints the other runs that use the folder, and seen(), which prints the folder's
# device and inode, or nothing if there is no folder.
_LOCK: Final = """
mkdir -p "${FOLDER%/*}" || exit
LOCK="${FOLDER%/*}/.${FOLDER##*/}.delivery.lock"
# To lock a file of another user, read permission is enough.
if [ -e "$LOCK" ] && [ ! -w "$LOCK" ]; then exec 9<"$LOCK"; else exec 9>>"$LOCK"; fi
flock -w 60 9 || { echo "its lock is held"; exit 1; }
users() {
  for use in "${RUN%/*}"/*/uses/"$USE"; do
    user=${use%/uses/*}
    [ "$user" = "$RUN" ] || [ ! -e "$use" ] || printf ' %s' "${user##*/}"
  done
}
seen() { stat -c %d:%i "$FOLDER" 2>/dev/null; }
"""
# Record this run's use; print the folder's identity (seen) and its other users.
_NOTE: Final = f"""{_LOCK}
mkdir -p "$RUN/uses/$USE" || exit
printf '%s' "$(seen)$(users)"
"""
_UNPACK: Final = """
mkdir -p "$PARTIAL" && tar -C "$PARTIAL" -xf - || { rm -rf "$PARTIAL"; exit 1; }
"""
# Move the copy into place if the folder is still missing, or is the one seen before and no other run uses it.
_PLACE: Final = f"""{_LOCK}
if [ "$(seen)" = "$SEEN" ] && [ -z "$SEEN" -o -z "$(users)" ]; then
  [ -z "$SEEN" ] || mv -T "$FOLDER" "$PARTIAL.before" || exit
  mv -T "$PARTIAL" "$FOLDER" || exit
  printf placed
fi
exec 9>&-
rm -rf "$PARTIAL" "$PARTIAL.before" 2>/dev/null || true  # else it goes with the run
"""
# Scripts that find files; _hash_files() adds what is done with each file.
_FILES: Final = 'cd "$FOLDER" && find "$LINKS" . -type f'
_FILES_IN_PLACE: Final = """
[ -d "$PLACE" ] || { ONLY=${PLACE##*/}; PLACE=${PLACE%/*}; }
cd "$PLACE" && find -L "./$ONLY" -type f"""
# Records end with NUL, so that any name is possible; the record of a link begins with its target.
_LINKS: Final = """ && find "$LINKS" . -type l -printf '->%l\\0%p\\0'"""
# Followed links stand for their targets, as in an export; a broken link has a record of its own.
_AS_LINKS, _FOLLOWED = "-P", "-L"
_PACK_OUTPUT: Final = "find -L . -type f -print0 | tar --null --no-recursion -h -T - -cf -"

Listing = dict[str, str]
"""Path of a file or link below a folder -> its sha256, or ``->`` and the link's target."""


class Delivery(NamedTuple):
    """A folder that a run needs on every host."""

    folder: Path
    """The same path here and on the hosts: ``<home>/<kind>/<name>``."""
    files: Mapping[str, str]
    """Path of a file below it -> its sha256; a path that ends with a slash is an empty folder."""
    run: Path
    """The run's folder, ``<home>/runs/<run>``, which its clean-up deletes on every host."""

    @property
    def names(self) -> dict[str, str | Path]:
        """Names and values of the shell variables that the scripts read."""
        use = f"{self.folder.parent.name}/{self.folder.name}"
        return {"FOLDER": self.folder, "RUN": self.run, "USE": use}


class Delivered(NamedTuple):
    """The result of a delivery."""

    copied: list[str]
    """Hosts that received a copy; the others had one."""
    in_use: list[str]
    """Hosts that have another folder of this name in use, each with its users."""


def deliver(
    target: BareMetal, hosts: Sequence[Host], delivery: Delivery, in_use: Callable[[], bool]
) -> Delivered:
    """Copy a folder to every host that does not have it yet, and record there that a run uses it.

    A host has the folder if all its files exist there with the same sha256: in a shared folder, or by an
    earlier copy. More files, such as bytecode, do not matter. A folder that differs is replaced, unless
    another run uses it: the host has recorded such a use, or ``in_use`` returns that a run of this machine
    uses it.

    Raises:
        StageError: A copy failed, or differs from the source; it is not moved into place then.
        LaunchError: A host cannot be reached.
    """
    folder, expected = delivery.folder, _expected_listing(delivery.files)

    def deliver_to(host: Host) -> Delivered:
        """Deliver to one host; begin again if another run changes its folder meanwhile."""
        for _ in range(_TRIES):
            # _NOTE records the use first: from then on no other run replaces the folder.
            answer = ssh.script_or_raise(target, host, _NOTE, delivery.names)
            identity, *users = answer.split(" ")  # of the host's folder; empty: it has none
            present = _host_listing(target, host, folder) if identity else None
            if present is not None and expected.items() <= present.items():
                _warn_of_surplus(present.keys() - expected.keys(), folder, host)
                return Delivered(copied=[], in_use=[])
            if identity and (users or in_use()):
                return Delivered(
                    copied=[], in_use=[f"{host.name} ({', '.join(users) or 'a run of this machine'})"]
                )
            if _send(target, host, delivery, identity):
                return Delivered(copied=[host.name], in_use=[])
        raise StageError(f"others change {folder} on host {host.name} all the time", field="target.directory")

    delivered = ssh.at_all(hosts, deliver_to)
    return Delivered(
        copied=[name for of_host in delivered for name in of_host.copied],
        in_use=[entry for of_host in delivered for entry in of_host.in_use],
    )


def _warn_of_surplus(surplus: Iterable[str], folder: Path, host: Host) -> None:
    """Log that a host's folder also has files that are not of the source, except bytecode."""
    names = [name for name in surplus if "__pycache__" not in name and not name.endswith(".pyc")]
    if names:
        shown = recordable(first_of(names))
        _LOG.warning("%s on host %s also has %s, which is none of it", folder, host.name, shown)


def _send(target: BareMetal, host: Host, delivery: Delivery, seen: str) -> bool:
    """Copy to a new folder on a host, and put it in the place of the host's present folder.

    Args:
        target: The hosts.
        host: The host.
        delivery: The folder to copy.
        seen: Device and inode of the host's present folder, ``DEVICE:INODE``; empty: it has none.

    Returns:
        True: the copy is in place. False: another folder is there by now, or another run uses the folder; the
        copy is deleted.

    Raises:
        StageError: The copy failed, or differs from the source.
        LaunchError: The host cannot be reached.
    """
    partial = delivery.run / "deliveries" / uuid.uuid4().hex  # below the run's folder, and deleted with it
    # Not by ssh.script(), which gives a script no input: tar reads the archive from stdin.
    unpack = f"PARTIAL={shlex.quote(str(partial))}{_UNPACK}"
    with tempfile.NamedTemporaryFile() as listed:
        listed.writelines(b"./%s\0" % os.fsencode(path) for path in delivery.files)
        listed.flush()
        pack = ["tar", "-C", str(delivery.folder), "--null", "--no-recursion", "-T", listed.name, "-cf", "-"]
        _stream(pack, ssh.command(target, host, ["sh", "-c", unpack]), host.name)
    if _host_listing(target, host, partial) != _expected_listing(delivery.files):
        raise StageError(f"what arrived of {delivery.folder} on host {host.name} is not what was sent")
    placed = ssh.script_or_raise(target, host, _PLACE, delivery.names | {"PARTIAL": partial, "SEEN": seen})
    return placed == "placed"


def hosts_without(
    target: BareMetal, hosts: Sequence[Host], path: Path, files: Mapping[str, str]
) -> list[str]:
    """Name the hosts on which a file or folder is missing, or differs from that of this machine.

    ``files``: path -> sha256 of each file on this machine. Links count as their targets.
    """
    expected = _expected_listing(files)

    def differs(host: Host) -> bool:
        """Whether a host has other content at the path, or none."""
        # If the path is a file, the script sets ONLY to its name.
        done = _hash_files(target, host, _FILES_IN_PLACE, {"PLACE": path, "ONLY": ""})
        # An exit code: the host has no such file or folder, or cannot read it.
        return bool(done.code) or _parse_listing(done.output) != expected

    answers = zip(hosts, ssh.at_all(hosts, differs), strict=True)
    return [host.name for host, is_different in answers if is_different]


def _expected_listing(files: Mapping[str, str]) -> Listing:
    """Return the listing that a host with these files must have, without empty folders."""
    return {path: sha256 for path, sha256 in files.items() if not path.endswith("/")}


def collect(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Copy a folder's files from the hosts to the same folder here; returns the names of those hosts.

    Links are replaced by their targets, which may exist on that host only. Nothing is deleted on a host, and
    nothing is copied if two hosts have different files of one name.

    Raises:
        ExportError: Two hosts have different files of one name, or a host has no such folder.
        StageError: A copy failed, or differs from the source.
        LaunchError: A host cannot be reached.
    """
    answers = ssh.at_all(hosts, lambda host: _host_listing(target, host, folder, _FOLLOWED))
    listings: dict[Host, Listing] = {}
    for host, listing in zip(hosts, answers, strict=True):
        if listing is None:
            message = f"host {host.name} has no folder {folder}, or not all of it can be read there"
            raise ExportError(message, field="run.output")
        # Links are followed: only broken ones are still listed as links.
        for path in [path for path, content in listing.items() if content.startswith("->")]:
            del listing[path]
            name = recordable(path)
            _LOG.warning("%s in %s on host %s leads nowhere, and is left out", name, folder, host.name)
        if listing:
            listings[host] = listing
    local = _local_listing(folder)
    by_machine = {"this machine": local} | {
        f"host {host.name}": on_host for host, on_host in listings.items()
    }
    _refuse_conflicts(by_machine, folder)
    sources = []
    for host, listing in listings.items():
        if missing := listing.keys() - local.keys():
            _copy_missing(target, host, folder, listing, missing)
            local |= listing  # hosts may share files: each file comes from the first host that has it
            sources.append(host.name)
    return sources


def _refuse_conflicts(listings: Mapping[str, Listing], folder: Path) -> None:
    """Raise an ExportError if two machines have different content at one path, or a file and a folder."""
    # Path -> the first machine that has it, and its content there: a sha256, or "folder".
    first_seen: dict[str, tuple[str, str]] = {}
    for machine, listing in listings.items():
        for file, sha256 in listing.items():
            # The folders around a file count too: where one machine has a folder, another may have a file.
            folders = dict.fromkeys(map(str, PurePath(file).parents), "folder")
            for path, content in {file: sha256, **folders}.items():
                first, first_content = first_seen.setdefault(path, (machine, content))
                if first_content != content:
                    raise ExportError(
                        f"{first} and {machine} have different content in {folder}/{path}, and the files of "
                        "all hosts come into one folder",
                        field="run.output",
                        fix="Have one rank alone write it, or put the rank into its name; or rename it on "
                        "one host, and run again with the same run id",
                    )


def _copy_missing(
    target: BareMetal, host: Host, folder: Path, listing: Listing, missing: Iterable[str]
) -> None:
    """Copy a whole folder of a host, verify it, and move the files that are missing here into place.

    Mostly all of it is missing: if the machines share the folder, nothing is, and this is not called.

    Raises:
        StageError: The copy failed, or differs from ``listing``, which the host gave before.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # What the host prints before the marker, such as a banner, does not belong to the archive.
    pack = f"printf {shlex.quote(ssh.BEGIN)} && cd {shlex.quote(str(folder))} && {_PACK_OUTPUT}"
    _stream(
        ssh.command(target, host, ["sh", "-c", pack]),
        ["tar", "-C", str(partial), "-xf", "-"],
        host.name,
        begin=ssh.BEGIN.encode(),
    )
    if _local_listing(partial) != listing:
        raise StageError(f"what arrived of {folder} from host {host.name} is not what was sent")
    for path in missing:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (partial / path).rename(folder / path)
    shutil.rmtree(partial)


def _local_listing(folder: Path) -> Listing:
    """List a folder of this machine: path -> sha256. Links count as their targets, broken ones not at all."""
    listing = {}
    for item in below(str(folder), left_out=lambda *_: None):  # without FIFOs and the like, as on hosts
        if not item.is_folder:
            with open_file(str(folder / item.path)) as file:
                listing[item.path] = hashlib.file_digest(file, "sha256").hexdigest()
    return listing


def _host_listing(target: BareMetal, host: Host, folder: Path, links: str = _AS_LINKS) -> Listing | None:
    """List a folder's files and links on a host; None: there is none, or not all of it can be read."""
    done = _hash_files(target, host, _FILES, {"FOLDER": folder, "LINKS": links}, more=_LINKS)
    return None if done.code else _parse_listing(done.output)


def _hash_files(
    target: BareMetal, host: Host, files: str, variables: Mapping[str, str | Path], more: str = ""
) -> Completed:
    """Hash the files on a host that the script ``files`` finds, and then run the script ``more``.

    Returns the exit code and the output of both. The timeout is an hour, and a second more for each 10 MiB of
    the files.
    """
    sizes = ssh.script(target, host, f"{files} -printf '%s\\n'", variables, ssh.COPY_TIMEOUT_S)
    if sizes.code:
        return sizes
    timeout = ssh.COPY_TIMEOUT_S + sum(map(int, sizes.output.split())) / _HASHED_BYTES_PER_S
    return ssh.script(target, host, f"{files} -exec sha256sum -z {{}} +{more}", variables, timeout)


def _parse_listing(printed: bytes) -> Listing:
    """Parse the output of :func:`_hash_files`, whose records end with NUL.

    A file has one record, ``SHA256  PATH``; a link has two, ``->TARGET`` and its path.
    """
    listing = Listing()
    records = iter(os.fsdecode(printed).split("\0")[:-1])
    for record in records:
        if record.startswith("->"):
            content, path = record, next(records)
        else:
            content, path = record.split("  ", 1)
        listing[path.removeprefix("./")] = content
    return listing


def _stream(source: list[str], sink: list[str], host: str, begin: bytes = b"") -> None:
    """Pipe the output of the command ``source``, after the marker ``begin``, into the command ``sink``.

    Raises:
        StageError: A command failed, or nothing moved for an hour.
    """
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(source, bufsize=0, stdout=subprocess.PIPE, stderr=stderr) as sender,
        subprocess.Popen(
            sink, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr
        ) as receiver,
    ):
        assert sender.stdout is not None and receiver.stdin is not None  # noqa: S101, PT018 - for the type checker
        try:
            with sender.stdout, receiver.stdin, suppress(BrokenPipeError):  # the sink's exit code tells why
                _pump(sender.stdout, receiver.stdin, begin)
            codes = [receiver.wait(ssh.COPY_TIMEOUT_S), sender.wait(_END_TIMEOUT_S)]
        except subprocess.TimeoutExpired as error:
            codes = [receiver.poll() or 0]  # 0 also if it still runs
            if not any(codes):  # else the sink's failure is the cause, and is raised below
                raise StageError(
                    f"copying to or from host {host} made no progress for {error.timeout:g} s"
                ) from error
        finally:
            sender.kill()
            receiver.kill()
        stderr.seek(0)
        text = stderr.read().decode(errors="replace").strip()[-500:]
    if any(codes):
        raise StageError(f"copying to or from host {host} failed: {text}")


def _pump(source: IO[bytes], sink: IO[bytes], begin: bytes) -> None:
    """Copy a pipe to another, from after the marker ``begin`` to the end.

    Raises:
        subprocess.TimeoutExpired: Nothing moved for ``ssh.COPY_TIMEOUT_S`` seconds.
        BrokenPipeError: Nothing reads the sink any more.
    """
    os.set_blocking(sink.fileno(), False)
    before, found = b"", not begin
    while block := _when_ready(source, select.POLLIN, sink).read(_BLOCK_BYTES):
        if not found:
            before += block  # the marker may be split between two blocks
            _, marker, block = before.partition(begin)  # without the marker, nothing is left to write
            found = bool(marker)
        rest = memoryview(block)
        while rest:
            rest = rest[_when_ready(sink, select.POLLOUT, sink).write(rest) or 0 :]


def _when_ready(pipe: IO[bytes], event: int, sink: IO[bytes]) -> IO[bytes]:
    """Wait until a pipe can be read (POLLIN) or written (POLLOUT), and return it.

    Raises:
        subprocess.TimeoutExpired: It cannot within ``ssh.COPY_TIMEOUT_S`` seconds.
        BrokenPipeError: Nothing reads ``sink`` any more.
    """
    poll = select.poll()
    poll.register(sink, 0)  # the end of its reader is always reported
    poll.register(pipe, event)
    ready = poll.poll(ssh.COPY_TIMEOUT_S * 1000)
    if not ready:
        raise subprocess.TimeoutExpired("the copy", ssh.COPY_TIMEOUT_S)
    if pipe.fileno() not in dict(ready):
        raise BrokenPipeError
    return pipe
