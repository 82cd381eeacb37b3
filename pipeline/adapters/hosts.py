"""Read the hostfile of a ``baremetal`` target, and check its hosts with one ssh command on each."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.adapters import ssh
from manycpu.pipeline.spec.errors import BadInputError, Finding, LaunchError, ManycpuError
from manycpu.pipeline.spec.kernel import interface_of
from manycpu.pipeline.spec.memory_estimate import Estimate
from manycpu.pipeline.spec.memory_estimate import findings as memory_findings
from manycpu.pipeline.spec.placement import Host, Mpi
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import public

_HOSTFILE_FIELD = "target.hostfile"
_HOSTFILE_SHAPE = (
    "Write a host on each line: `name`, `name:processes` or `name slots=processes`; "
    "a host with an IPv6 address alone needs a name"  # no MPI reads the address in its hostfile
)
# A name must not begin with a dash, which ssh would read as an option.
_HOSTFILE_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)"
    r"(?::(?P<count>\S*)|(?P<words>(?:\s+\S+=\S*)*))"
)
_TIMEOUT_S: Final = 60.0
_SHOWN_CHARACTERS: Final = 500  # at the end of a host's output, in an error
# Runs on the host, by its own Python, from stdin: so it works on hosts without manycpu, and reports that.
_PROBE: Final = """
import importlib.metadata, json, os, pathlib, socket, sys

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

facts = {name: version(name) for name in ("manycpu", "torch", "accelerate")}
facts["python"] = "%d.%d" % sys.version_info[:2]
facts["hostname"] = socket.gethostname()
facts["ssh"] = os.environ.get("SSH_CONNECTION", "").split()
facts["missing_files"] = [path for path in sys.argv[1:] if not pathlib.Path(path).exists()]
if facts["manycpu"]:
    from manycpu.pipeline.spec.machine import Machine
    facts["cores"], facts["memory"] = Machine.observe().processors, Machine.observe().memory
with socket.socket() as listener:
    listener.bind(("", 0))
    facts["port"] = listener.getsockname()[1]
print("\\n::probe::" + json.dumps(facts))
"""


def parse_hostfile(text: str) -> tuple[Host, ...]:
    r"""Parse a hostfile of any of the three MPIs.

    Raises:
        BadInputError: A line cannot be read, a host is named twice, or there is no host.

    >>> parse_hostfile("node-a\nnode-b:2  # big\n")
    (Host(name='node-a', slots=None), Host(name='node-b', slots=2))
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        host = _parse_host(words, number)
        if host.name in hosts:
            raise BadInputError(
                f"line {number} names the host {host.name!r} a second time",
                field=_HOSTFILE_FIELD,
                fix="Name each host once; run.nproc_per_node says how many processes it gets",
            )
        hosts[host.name] = host
    if not hosts:
        raise BadInputError("the file names no host", field=_HOSTFILE_FIELD, fix=_HOSTFILE_SHAPE)
    return tuple(hosts.values())


def _parse_host(words: str, number: int) -> Host:
    """Parse a line of a hostfile, without its comment.

    Raises:
        BadInputError: It cannot be read; the error names the ``number`` of the line.
    """

    def bad(what: str) -> BadInputError:
        return BadInputError(f"line {number} {what}", field=_HOSTFILE_FIELD, fix=_HOSTFILE_SHAPE)

    match = _HOSTFILE_LINE.fullmatch(words)
    if match is None:
        raise bad(f"cannot be read: {words!r}")
    settings = dict(setting.split("=", 1) for setting in (match["words"] or "").split())
    if unknown := settings.keys() - {"slots", "max_slots", "max-slots"}:
        raise bad(f"says {min(unknown)!r}, which is no setting of a host")
    # max_slots may be given, and is ignored.
    count = match["count"] if match["count"] is not None else settings.get("slots")
    if count is not None and not re.fullmatch(r"[1-9][0-9]{0,5}", count):
        raise bad(f"gives the host {match['name']!r} {count!r} processes")
    return Host(match["name"], int(count) if count else None)


class _Inspected(NamedTuple):
    """A host, and what `_PROBE` printed there."""

    host: Host
    facts: dict[str, Any]


def chosen(target: BareMetal, run: TrainingRun) -> tuple[Host, ...]:
    """Return the first hosts of the hostfile, one for each node up to the run's maximum.

    Raises:
        BadInputError: The hostfile cannot be read, has too few hosts, or gives one of them too few slots.
    """
    try:
        hosts = parse_hostfile(Path(target.hostfile).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(
            f"{target.hostfile} cannot be read: {reason}",
            field=_HOSTFILE_FIELD,
            fix="Give a hostfile's path",
        ) from error
    nodes = run.nodes.most
    if nodes > len(hosts):
        raise BadInputError(
            f"{nodes} nodes were asked for, and {target.hostfile} has {len(hosts)} hosts",
            field="run.nnodes",
            fix="Ask for fewer nodes, or add hosts",
        )
    for host in hosts[:nodes]:
        if host.slots is not None and host.slots < run.processes and not run.oversubscribe:
            raise BadInputError(
                f"{run.processes} processes were asked for, the hostfile gives {host.name} {host.slots}",
                field="run.nproc_per_node",
                fix=f"Set it to {host.slots} or less, or set run.oversubscribe to true",
            )
    return hosts[:nodes]


def check(
    target: BareMetal,
    run: TrainingRun,
    mpi: Mpi | None,
    needs: Mapping[str, str] | None = None,
    estimated: Estimate | str = "",
) -> list[Finding]:
    """Return a finding for each problem of the hosts: Python, manycpu, torch, cores, memory, MPI.

    If the hostfile cannot be used, that is the only finding.

    Args:
        target: The target.
        run: The run.
        mpi: The MPI that every host must have; None: none is needed.
        needs: Package -> version that every host must have; None: no version is needed.
        estimated: The memory of the run's ranks; a text: why it is unknown, so that it is not checked.
    """
    try:
        hosts = chosen(target, run)
    except BadInputError as error:
        return [_finding(error)]

    def inspect(host: Host) -> _Inspected | Finding:
        """Probe a host; return what was found there, or a finding if it cannot be probed."""
        try:
            return _Inspected(host, _probe(target, host, files=[mpi.mpirun] if mpi else []))
        except ManycpuError as error:
            return _finding(error)

    results = ssh.at_all(hosts, inspect)
    problems = [result for result in results if isinstance(result, Finding)]
    inspected = [result for result in results if isinstance(result, _Inspected)]
    problems += [finding for entry in inspected for finding in _check_host(target, run, entry)]
    # Each rank takes as much as the others: the host with the least memory decides.
    memories = [(entry.facts["memory"], entry.host.name) for entry in inspected if entry.facts.get("memory")]
    memory_problems: Iterator[Finding] = iter(())
    if memories and not isinstance(estimated, str):
        memory, name = min(memories)
        memory_problems = memory_findings(estimated, memory, _HOSTFILE_FIELD, f"host {name}")
    # Compare hosts only if each is right by itself: a package that is missing has no version.
    compared = problems or [*_compare_hosts(inspected), *_compare_with_needs(inspected, needs or {})]
    return [*compared, *memory_problems]


def placement(target: BareMetal, run: TrainingRun) -> dict[str, Any]:
    """Return the fields of a Placement that depend on the hosts; the ranks meet at the first one.

    Returns:
        hosts, python, master_addr (the first host's address), master_port (free there a moment ago),
        launcher_address and launcher_interface.

    Raises:
        BadInputError: The hostfile cannot be used.
        LaunchError: The first host cannot be reached, or has no such Python.
    """
    hosts = chosen(target, run)
    facts = _probe(target, hosts[0], files=[])
    try:  # SSH_CONNECTION has address and port of this machine, then of the host
        own_address, _, host_address, _ = facts["ssh"]
    except ValueError:  # the host does not set it
        own_address, host_address = "", hosts[0].name
    return {
        "hosts": hosts,
        "python": python_of(target),
        "master_addr": host_address,
        "master_port": facts["port"],
        "launcher_address": own_address or None,
        "launcher_interface": interface_of(own_address),
    }


def python_of(target: BareMetal) -> str:
    """Return the path of Python on every host: ``target.python``, or that of the Python that runs here."""
    return target.python or sys.executable


def _probe(target: BareMetal, host: Host, files: Sequence[str]) -> dict[str, Any]:
    """Run the script ``_PROBE`` by a host's Python, and return what it found there.

    The script reads versions of packages, cores, memory, a free port, and which of ``files`` are missing.

    Raises:
        LaunchError: The host cannot be reached, or has no such Python.
    """
    python = python_of(target)
    done = ssh.run(target, host, [python, "-", *files], timeout=_TIMEOUT_S, input=_PROBE.encode())
    # The host may print a banner, and its login shell more, before that line.
    facts_line = next((line for line in done.out.splitlines() if line.startswith("::probe::")), None)
    if facts_line is None:
        raise LaunchError(
            f"host {host.name} cannot run {python}; it said: {done.out.strip()[-_SHOWN_CHARACTERS:]}",
            field="target.python",
            fix="Install Python with manycpu and torch there, at the same path on every host",
        )
    facts: dict[str, Any] = json.loads(facts_line.removeprefix("::probe::"))
    return facts


def _check_host(target: BareMetal, run: TrainingRun, inspected: _Inspected) -> Iterator[Finding]:
    """Yield a finding for each problem of one host by itself: packages, files and cores."""
    name, facts = inspected.host.name, inspected.facts
    for package in ("manycpu", "torch"):
        if facts[package] is None:
            yield Finding(
                "target.python",
                f"{python_of(target)} on host {name} has no {package}",
                "Install it there: pip install 'manycpu[train]'",
            )
    for path in facts["missing_files"]:
        yield Finding(
            "target.mpi", f"host {name} has no {path}", "Install the same MPI at the same path on every host"
        )
    cores = facts.get("cores")  # unknown without manycpu
    if cores is not None and run.processes > cores and not run.oversubscribe:
        yield Finding(
            "run.nproc_per_node",
            f"{run.processes} processes were asked for, and host {name} grants {cores:g} cores",
            f"Set it to {max(1, int(cores))} or less, or set run.oversubscribe to true",
        )


def _compare_hosts(inspected: Sequence[_Inspected]) -> Iterator[Finding]:
    """Yield a finding for each version that differs between hosts, or from this machine's manycpu.

    Also one for each host that has two names in the hostfile.
    """
    for package in ("python", "manycpu", "torch"):
        versions = {entry.host.name: entry.facts[package] for entry in inspected}
        if len(set(versions.values())) > 1:
            shown = ", ".join(f"{name} has {number}" for name, number in versions.items())
            yield Finding(
                "target.python",
                f"the hosts have different versions of {package}: {shown}",
                f"Install the same version of {package} on every host",
            )
    on_hosts, here = {entry.facts["manycpu"] for entry in inspected}, version("manycpu")
    if here not in on_hosts:
        yield Finding(
            "target.python",
            f"the hosts have manycpu {', '.join(sorted(on_hosts))}, this machine has {here}",
            "Install the same version of manycpu everywhere",
        )
    names_by_address: dict[str, list[str]] = {}
    for entry in inspected:
        for address in entry.facts["ssh"][2:3]:  # the third word of SSH_CONNECTION, if the host sets it
            names_by_address.setdefault(address, []).append(entry.host.name)
    for address, names in names_by_address.items():
        if len(names) > 1:
            yield Finding(
                "target.hostfile",
                f"{' and '.join(names)} are names of one host, {address}",
                "Name each host once; run.nproc_per_node says how many processes it gets",
            )


def _compare_with_needs(inspected: Sequence[_Inspected], needs: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each package whose version on a host differs from the notebook's.

    ``needs``: package -> version in the notebook. A notebook's function is sent between equal versions only.
    """
    for name, needed in needs.items():
        # The needs name Python, the facts python.
        hosts_by_version = {public(entry.facts[name.lower()] or ""): entry.host.name for entry in inspected}
        for present, host in hosts_by_version.items():
            if present not in ("", needed):  # empty: the host lacks the package
                yield Finding(
                    "target.python",
                    f"host {host} has {name} {present}, and the notebook {needed}: a function travels "
                    "between the same versions only",
                    f"Install {name} {needed} on every host, or name another Python",
                )


def _finding(error: ManycpuError) -> Finding:
    return Finding.of(error, "target.hostfile")
