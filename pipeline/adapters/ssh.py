"""Run commands on the hosts of a ``baremetal`` target over ssh.

All calls have a timeout. ``at_all`` runs a function for every host at once.

A host and its login shell may print a banner first. So each script prints a marker line, and only what
follows that line counts as its output.
"""

import os
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal

_CONNECT_TIMEOUT_S: Final = 10
COMMAND_TIMEOUT_S: Final = 60.0
"""Seconds for a short command, with a slow login."""
COPY_TIMEOUT_S: Final = 3600.0
"""Seconds to copy a folder within a host, or without progress between machines."""
_UNREACHED: Final = 255  # ssh's own exit code, for connection errors
_PARALLEL_HOSTS: Final = 16
BEGIN: Final = "\n::manycpu-begin::\n"
"""Marker before the output that is read from a host."""
_END: Final = "\n::manycpu-end::\n"

_COPY_FOLDER: Final = """
[ -e "$FOLDER" ] && exit
mkdir -p "${FOLDER%/*}" && cp -R "$SOURCE" "$PARTIAL" && chmod -R u+w "$PARTIAL" || exit
mv -T "$PARTIAL" "$FOLDER" 2>/dev/null || rm -rf "$PARTIAL"  # another host that shares the folder was first
[ -e "$FOLDER" ]
"""
# Whether the folder is this run's own: a run of that name from another machine has the same folder.
_IS_OWN: Final = '[ -z "$OWNER" ] || [ "$(cat "$MARK" 2>/dev/null)" = "$OWNER" ]'
# The mark is linked into place, because a link replaces no file: of two claims at once, the first wins. Some
# file systems have no links: there the mark is moved. The script prints the owner that the mark names.
_CLAIM: Final = """
mkdir -p "$FOLDER" || exit
if [ ! -s "$MARK" ]; then
  [ -n "$KNOWN" ] || [ ! -e "$FOLDER/attempts" ] || { printf 'an earlier version of manycpu'; exit; }
  new=$(mktemp "$MARK.XXXXXX") && printf %s "$OWNER" >"$new" && chmod 644 "$new" || exit
  sync "$new" 2>/dev/null
  [ ! -e "$MARK" ] || [ -s "$MARK" ] || mv "$new" "$MARK" || exit
  ln "$new" "$MARK" 2>/dev/null || [ -e "$MARK" ] || mv "$new" "$MARK" || exit
  rm -f "$new"
fi
cat "$MARK"
"""
_END_RANKS: Final = f"""
[ ! -d "$FOLDER" ] || {_IS_OWN} || exit 0
[ -r /proc/self/environ ] || {{ echo "the processes cannot be seen"; exit 1; }}
ranks() {{ grep -lF "MANYCPU_OUTPUT=$FOLDER/attempts/" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }}
for signal in TERM KILL; do
  for second in 1 2 3 4 5 6 7 8 9 10; do
    left=$(ranks)
    [ -n "$left" ] || exit 0
    [ $second -gt 1 ] || kill -$signal $left 2>/dev/null
    sleep 1
  done
done
echo "process $left does not end"
exit 1
"""
# The mark goes last: if a removal is cut off, the mark still shows whose the rest is.
_REMOVE: Final = f"""
[ -d "$FOLDER" ] || exit 0
if ! {{ {_IS_OWN}; }}; then
  [ ! -s "$MARK" ] || exit 0
  [ ! -e "$FOLDER/attempts" ] || exit 1  # the mark is lost: whose folder it is cannot be seen
fi
for path in "$FOLDER"/* "$FOLDER"/.[!.]* "$FOLDER"/..?*; do
  [ "$path" = "$MARK" ] || rm -rf -- "$path" || exit
done
rm -rf -- "$FOLDER"
"""
_KEEP_ONLY: Final = f"""
{_IS_OWN} || exit 0
for path in "$FOLDER"/* "$FOLDER"/attempts/*/*; do
  case " $NAMES " in *" ${{path##*/}} "*) ;; *) rm -rf -- "$path" ;; esac
done
"""

T = TypeVar("T")


class RunFolder(NamedTuple):
    """A run's folder, which has the same path on every host."""

    path: Path
    mark: Path
    """The file in it that says whose folder it is."""
    owner: str
    """The text of that file in this run's folder; empty: an older version made the run, without a mark."""

    @property
    def variables(self) -> dict[str, str | Path]:
        """Names and values of the shell variables that the scripts read."""
        return {"FOLDER": self.path, "MARK": self.mark, "OWNER": self.owner}


def command(target: BareMetal, host: Host, argv: Sequence[str]) -> list[str]:
    """Build the arguments that run a command on a host; the user's own ssh options win."""
    # A terminal, which ~/.ssh/config may ask for, would change the bytes of the output.
    options = ["-o", "BatchMode=yes", "-o", "RequestTTY=no", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}"]
    return [*target.ssh, *options, host.name, shlex.join(argv)]


def run(
    target: BareMetal,
    host: Host,
    argv: Sequence[str],
    *,
    timeout: float = COMMAND_TIMEOUT_S,
    input: bytes | None = None,  # noqa: A002 - the name that subprocess gives it
) -> commands.Completed:
    """Run a command on a host, for at most ``timeout`` seconds; returns its exit code and its output.

    Raises:
        LaunchError: The host cannot be reached, or the command timed out.
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
    with ThreadPoolExecutor(max_workers=_PARALLEL_HOSTS, thread_name_prefix="ssh") as pool:
        return list(pool.map(do, hosts))


def script(
    target: BareMetal,
    host: Host,
    text: str,
    variables: Mapping[str, str | Path],
    timeout: float = COMMAND_TIMEOUT_S,
) -> commands.Completed:
    """Run a shell script on a host, with ``variables`` set; returns its exit code and its output.

    If the script succeeds, the output is without the host's banner; if it fails, a banner may be in it.

    Raises:
        LaunchError: The host cannot be reached, or the script timed out.
    """
    assignments = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in variables.items())
    # A subshell: `exit` in the script ends it alone, and the end marker follows a success.
    marked = f"{assignments}printf {shlex.quote(BEGIN)}\n(\n{text}\n) && printf {shlex.quote(_END)}"
    done = run(target, host, ["sh", "-c", marked], timeout=timeout)
    _, begin, rest = done.output.partition(BEGIN.encode())
    printed, end, _ = rest.rpartition(_END.encode())
    if begin and end and not done.code:
        return commands.Completed(code=0, output=printed)
    # Without the end marker the script has failed, whatever ssh returned.
    return commands.Completed(done.code or 1, rest or done.output)


def script_or_raise(
    target: BareMetal,
    host: Host,
    text: str,
    variables: Mapping[str, str | Path],
    timeout: float = COMMAND_TIMEOUT_S,
) -> str:
    """Run a shell script on a host, with ``variables`` set, and return its output.

    Raises:
        LaunchError: The script failed or timed out, or the host cannot be reached.
    """
    done = script(target, host, text, variables, timeout)
    if done.code:
        settings = ", ".join(f"{name.lower()} {value}" for name, value in variables.items())
        raise LaunchError(
            f"host {host.name} failed at {settings}; it said: {done.out.strip()[-500:] or 'nothing'}",
            field="target.directory",
        )
    return done.out


def make_folder(target: BareMetal, hosts: Sequence[Host], folder: Path) -> None:
    """Make a folder on every host."""
    at_all(hosts, lambda host: script_or_raise(target, host, 'mkdir -p "$FOLDER"', {"FOLDER": folder}))


def copy_folder(target: BareMetal, hosts: Sequence[Host], source: Path, folder: Path) -> None:
    """Copy a folder within every host, unless the copy exists: hosts may share folders."""

    def copy(host: Host) -> None:
        partial = f"{folder}.{host.name}.partial"  # each host its own, where hosts share the folder
        names: dict[str, str | Path] = {"SOURCE": source, "FOLDER": folder, "PARTIAL": partial}
        script_or_raise(target, host, _COPY_FOLDER, names, COPY_TIMEOUT_S)

    at_all(hosts, copy)


def claim(
    target: BareMetal, hosts: Sequence[Host], folder: RunFolder, known: Container[str]
) -> dict[Host, str]:
    """Make a run's folder on every host and mark it, unless another run has it there.

    Args:
        target: The hosts.
        hosts: The hosts to ask.
        folder: The folder.
        known: Names of hosts where an attempt of the run was: there, a folder without a mark is this run's.

    Returns:
        Host -> the owner of the folder there, for each host where that is another run; empty: all hosts have
        the folder for this run.

    Raises:
        LaunchError: A host cannot be reached, or the folder cannot be made there.
    """

    def owner_at(host: Host) -> str:
        """Claim the folder on a host; return the owner that the mark then names."""
        variables = folder.variables | {"KNOWN": "yes" if host.name in known else ""}
        return script_or_raise(target, host, _CLAIM, variables)

    owners = at_all(hosts, owner_at)
    return {host: owner for host, owner in zip(hosts, owners, strict=True) if owner != folder.owner}


def end_ranks(target: BareMetal, hosts: Sequence[Host], folder: RunFolder) -> dict[Host, str]:
    """End ranks that outlived the machine that launched them: SIGTERM, and after ten seconds SIGKILL.

    A rank of the run has an output below the run's folder, by its variable MANYCPU_OUTPUT.

    Returns:
        Host -> why its ranks may still run; a host without ranks is left out.
    """

    def problem(host: Host) -> str:
        """Return why ranks may still run on a host; empty: none does."""
        try:
            done = script(target, host, _END_RANKS, folder.variables)
        except LaunchError as error:
            return str(error)
        # A failed script without output is a problem too: the text must not be empty.
        return done.out.strip()[-500:] or "nothing was said" if done.code else ""

    problems = zip(hosts, at_all(hosts, problem), strict=True)
    return {host: text for host, text in problems if text}


def remove_folder(target: BareMetal, hosts: Sequence[Host], folder: RunFolder, timeout: float) -> list[str]:
    """Delete a run's folder on every host; returns the folders that are left, as ``host:folder``."""

    def is_removed(host: Host) -> bool:
        """Delete the folder on a host; false also if the host cannot be reached."""
        with suppress(LaunchError):
            return script(target, host, _REMOVE, folder.variables, timeout).code == 0
        return False

    removed = zip(hosts, at_all(hosts, is_removed), strict=True)
    return [f"{host.name}:{folder.path}" for host, is_gone in removed if not is_gone]


def keep_only(target: BareMetal, hosts: Sequence[Host], folder: RunFolder, names: Iterable[str]) -> None:
    """Delete all but ``names`` in a run's folder and its attempts' folders, on hosts that can be reached."""

    def keep(host: Host) -> None:
        with suppress(LaunchError):  # the removal of the run deletes the rest later
            script(target, host, _KEEP_ONLY, folder.variables | {"NAMES": " ".join(names)})

    at_all(hosts, keep)


def holding_files(
    target: BareMetal, hosts: Sequence[Host], folder: Path, *patterns: str
) -> dict[Host, list[str] | None]:
    """Find the hosts that have, or may have, files below a folder.

    Args:
        target: The hosts.
        hosts: The hosts to search.
        folder: The folder.
        patterns: Patterns for the files' paths below it; none: all files.

    Returns:
        Host -> paths of its files below the folder; None: it has no such folder, or cannot be reached. A host
        whose folder has no such files is left out.
    """
    # find runs within the folder: in the folder's own path, "[" or "*" would be a pattern too. It lists files
    # and links, each path with a NUL at its end.
    matching = " -o ".join(f"-path {shlex.quote(f'./{pattern}')}" for pattern in patterns or ("*",))
    text = f"cd \"$FOLDER\" && find . ! -type d '(' {matching} ')' -printf '%P\\0'"

    def files(host: Host) -> list[str] | None:
        """List the matching files on a host; None: it cannot be reached, or has no such folder."""
        try:
            listed = script(target, host, text, {"FOLDER": folder})
        except LaunchError:
            return None
        return None if listed.code else os.fsdecode(listed.output).split("\0")[:-1]

    listed = zip(hosts, at_all(hosts, files), strict=True)
    return {host: paths for host, paths in listed if paths != []}
