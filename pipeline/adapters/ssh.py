"""Run commands on the hosts of a ``baremetal`` target over ssh.

All calls are bounded in time:

- ``at_all(hosts, act)``: do something with every host at once.
- ``make_folder``, ``copy_folder``, ``remove_folder``, ``keep_only``: on every host; ``holding_files``: which
  hosts have files below a folder.
- ``run(target, host, argv)``: one command on one host; ``command(...)``: its arguments, for others to run;
  ``script(target, host, text, variables)``: what a shell script prints there.

A host may greet: what is read of a command's output begins behind a line of ours, whatever a banner or a
login shell printed before.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal

__all__ = [
    "BEGIN",
    "COPY_TIMEOUT",
    "at_all",
    "command",
    "copy_folder",
    "holding_files",
    "keep_only",
    "make_folder",
    "remove_folder",
    "run",
    "script",
    "script_or_raise",
]

_CONNECT: Final = 10  # seconds for a host to answer
_COMMAND: Final = 60.0  # seconds for a short command, a slow login included
COPY_TIMEOUT: Final = 3600.0
"""Seconds for a folder."""
_UNREACHED: Final = 255  # what ssh exits with when the connection is at fault
_PARALLEL: Final = 16
BEGIN: Final = "\n::manycpu-begin::\n"
"""In front of what is read of a host."""
_END: Final = "\n::manycpu-end::\n"

_COPY_FOLDER: Final = """
[ -e "$FOLDER" ] && exit
mkdir -p "${FOLDER%/*}" && cp -R "$SOURCE" "$PARTIAL" && chmod -R u+w "$PARTIAL" || exit
mv -T "$PARTIAL" "$FOLDER" 2>/dev/null || rm -rf "$PARTIAL"  # another host that shares the folder was first
[ -e "$FOLDER" ]
"""
_KEEP_ONLY: Final = """
for path in "$FOLDER"/* "$FOLDER"/attempts/*/*; do
  case " $NAMES " in *" ${path##*/} "*) ;; *) rm -rf "$path" ;; esac
done
"""

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


def script(
    target: BareMetal, host: Host, text: str, variables: Mapping[str, str | Path], timeout: float = _COMMAND
) -> commands.Completed:
    """Run a shell script on a host; where it succeeds, ``out`` is what it printed and nothing else.

    Args:
        target: The hosts.
        host: The host.
        text: The script.
        variables: Its variables.
        timeout: Seconds for it.

    Raises:
        LaunchError: The host cannot be reached, or the time was used up.
    """
    given = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in variables.items())
    marked = f"{given}printf {shlex.quote(BEGIN)}\n(\n{text}\n) && printf {shlex.quote(_END)}"
    done = run(target, host, ["sh", "-c", marked], timeout=timeout)
    _, begin, rest = done.out.partition(BEGIN)
    printed, end, _ = rest.rpartition(_END)
    if begin and end and not done.code:
        return commands.Completed(0, printed)
    return commands.Completed(done.code or 1, rest or done.out)


def script_or_raise(
    target: BareMetal, host: Host, text: str, variables: Mapping[str, str | Path], timeout: float = _COMMAND
) -> str:
    """Run a shell script on a host, and return what it printed.

    Raises:
        LaunchError: It failed, or the host cannot be reached.
    """
    done = script(target, host, text, variables, timeout)
    if done.code:
        named = ", ".join(f"{name.lower()} {value}" for name, value in variables.items())
        raise LaunchError(
            f"host {host.name} failed at {named}; it said: {done.out.strip()[-500:] or 'nothing'}",
            field="target.directory",
        )
    return done.out


def make_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> None:
    """Make a folder on every host.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be made.
    """
    at_all(hosts, lambda host: script_or_raise(target, host, 'mkdir -p "$FOLDER"', {"FOLDER": folder}))


def copy_folder(target: BareMetal, hosts: Sequence[Host], source: Path, folder: Path) -> None:
    """Copy a folder to another place on every host, unless it is there: folders may be shared.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be copied.
    """

    def copy(host: Host) -> None:
        names: dict[str, str | Path] = {
            "SOURCE": source,
            "FOLDER": folder,
            "PARTIAL": f"{folder}.{host.name}.partial",
        }
        script_or_raise(target, host, _COPY_FOLDER, names, COPY_TIMEOUT)

    at_all(hosts, copy)


def remove_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> list[str]:
    """Delete a folder on every host; returns what is still there, as ``host:folder``."""

    def remove(host: Host) -> list[str]:
        try:
            done = run(target, host, ["rm", "-rf", "--", str(folder)])
        except LaunchError:
            return [f"{host.name}:{folder}"]
        return [f"{host.name}:{folder}"] if done.code else []

    return [path for paths in at_all(hosts, remove) for path in paths]


def keep_only(target: BareMetal, hosts: Sequence[Host], folder: Path, names: Iterable[str]) -> None:
    """Delete all but such names in a run's folder and in those of its attempts, on hosts that are reached."""

    def keep(host: Host) -> None:
        with suppress(LaunchError):  # it goes with the rest
            script(target, host, _KEEP_ONLY, {"FOLDER": folder, "NAMES": " ".join(names)})

    at_all(hosts, keep)


def holding_files(
    target: BareMetal, hosts: Sequence[Host], folder: Path, *patterns: str
) -> dict[Host, list[str] | None]:
    """Find the hosts that have files below a folder.

    Args:
        target: The hosts.
        hosts: Those that are asked.
        folder: The folder.
        patterns: What the files' paths below it match; none: anything.

    Returns:
        Host -> its files, by path below the folder; None where it has no such folder, or cannot be asked.
    """
    # From within the folder: in its own path, "[" or "*" would be a pattern too.
    matching = " -o ".join(f"-path {shlex.quote(f'./{pattern}')}" for pattern in patterns or ("*",))
    text = f"cd \"$FOLDER\" && find . ! -type d '(' {matching} ')' -printf '%P\\0'"

    def files(host: Host) -> list[str] | None:
        try:
            found = script(target, host, text, {"FOLDER": folder})
        except LaunchError:
            return None
        return None if found.code else found.out.split("\0")[:-1]

    found = zip(hosts, at_all(hosts, files), strict=True)
    return {host: each for host, each in found if each != []}
