"""Real hosts on one machine: each has network, UTS, mount and PID namespaces, a name, an sshd and an init.

Needs root, ``ip`` and ``sshd``; :func:`reason` says what is missing. ``close`` removes everything.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_START = 300.0  # seconds until an sshd must answer


def reason() -> str | None:
    """Return why this machine cannot have such hosts, or None if it can."""
    if not sys.platform.startswith("linux"):
        return "hosts made of namespaces need Linux"
    missing = [
        program for program in ("ip", "ssh", "ssh-keygen", "unshare", "nsenter") if not shutil.which(program)
    ]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return f"hosts made of namespaces need {', '.join(missing)} (tests/system-packages installs them)"
    if os.geteuid() != 0:
        return "hosts made of namespaces need root"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], check=False)
    return None if probe.returncode == 0 else "this kernel or container allows no namespaces"


@dataclass
class Host:
    """A host: its name, its address, and the process that is the parent of its init."""

    name: str
    address: str
    process: subprocess.Popen[bytes]

    def processes(self) -> dict[int, str]:
        """Return the host's processes except sshd's: pid, as this machine sees it -> command line."""
        mine = _children_pid_namespace(self.process.pid)
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "ns/pid").readlink() == mine:
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        return {pid: line for pid, line in found.items() if line and "sshd" not in line}

    def run(self, *argv: str) -> str:
        """Run a command on the host, by entering its namespaces; return its output."""
        init = _child(self.process.pid)
        enter = ["nsenter", "-t", str(init), "--net", "--uts", "--mount", "--pid", "--"]
        return subprocess.run([*enter, *argv], check=True, capture_output=True, text=True, timeout=300).stdout


@dataclass
class Hosts:
    """Hosts on a bridge, to which this machine is connected too; ``tag`` is a part of all their names."""

    folder: Path
    names: Sequence[str]
    hide: dict[str, Sequence[str]] = field(default_factory=dict)
    """Host -> folders that are empty on that host."""
    settings: dict[str, str] = field(default_factory=dict)
    """Further options of each sshd."""
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    subnet: str = ""
    hosts: list[Host] = field(default_factory=list)

    @property
    def here(self) -> str:
        """The address of this machine among the hosts."""
        return f"{self.subnet}.1"

    @property
    def ssh(self) -> tuple[str, ...]:
        """The ssh command that reaches the hosts."""
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ConnectTimeout": "5",
            # Commands share an open connection: to open one takes longer than most commands.
            "ControlPath": f"/run/mc{self.tag}-%h",
        }
        flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ("ssh", "-F", "none", "-i", str(self.folder / "key"), *flags)

    def hostfile(self, *names: str, slots: int | None = None) -> Path:
        """Write a hostfile with the addresses of these hosts; return its path."""
        path = self.folder / f"hostfile-{uuid.uuid4().hex[:6]}"
        end = "" if slots is None else f":{slots}"
        path.write_text("".join(f"{host.address}{end}\n" for host in self.hosts if host.name in names))
        return path

    def __getitem__(self, name: str) -> Host:
        """Return a host by its name."""
        return next(host for host in self.hosts if host.name == name)

    def open(self) -> None:
        """Create the keys, the bridge and the hosts, and wait until each sshd answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        self.subnet = _free_subnet()
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.here}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        self._write_files()
        for number, name in enumerate(self.names, 2):
            self._add(name, number)
        for host in self.hosts:
            self._wait(host)
            _run(*self.ssh, "-f", "-N", "-o", "ControlMaster=yes", host.address)

    def close(self) -> None:
        """End all processes of the hosts, and delete every interface and namespace."""
        for host in self.hosts:
            subprocess.run([*self.ssh, "-O", "exit", host.address], check=False, capture_output=True)
            host.process.kill()  # kills its init too (--kill-child), and with it all other processes
            host.process.wait(300)
        # Delete the outer interfaces explicitly: the kernel deletes those of an ended namespace later.
        made = [["link", "del", self._outer(number)] for number, _ in enumerate(self.names, 2)]
        made += [["netns", "del", self._netns(name)] for name in self.names]
        for words in [*made, ["link", "del", self._bridge]]:
            subprocess.run(["ip", *words], check=False, capture_output=True)

    def leftovers(self) -> list[str]:
        """Return the interfaces and network namespaces of these hosts that still exist."""
        links = [link["ifname"] for link in json.loads(_run("ip", "-j", "link"))]
        spaces = _run("ip", "netns", "list").split()
        return [name for name in [*links, *spaces] if self.tag in name]

    @property
    def _bridge(self) -> str:
        return f"mcbr{self.tag}"

    def _netns(self, name: str) -> str:
        return f"mc{self.tag}-{name}"

    def _outer(self, number: int) -> str:
        return f"mco{self.tag}{number}"

    def _write_files(self) -> None:
        known = [f"{self.subnet}.{number} {name}" for number, name in enumerate(self.names, 2)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        settings = {
            "HostKey": self.folder / "host_key",
            "AuthorizedKeysFile": self.folder / "key.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "UseDNS": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "PidFile": "none",
            "MaxStartups": "100",
            "MaxSessions": "100",
            **self.settings,
        }
        (self.folder / "sshd_config").write_text(
            "".join(f"{key} {value}\n" for key, value in settings.items())
        )

    def _add(self, name: str, number: int) -> None:
        space, inner, outer = self._netns(name), f"mci{self.tag}{number}", self._outer(number)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        _run("ip", "link", "set", outer, "master", self._bridge, "up")
        _run("ip", "link", "set", inner, "netns", space)
        _run("ip", "-n", space, "link", "set", inner, "name", "eth0")
        _run("ip", "-n", space, "addr", "add", f"{self.subnet}.{number}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", space, "link", "set", interface, "up")
        steps = [
            f"hostname {name}",
            "mount -t proc proc /proc",
            "mount -t tmpfs tmpfs /run",
            "mount -t tmpfs tmpfs /dev/shm",
            "mkdir -p /run/sshd",
            f"mount --bind '{self.folder}/hosts' /etc/hosts",
            # bash reads it at each login, which may take longer than the test's own commands.
            "[ ! -f ~/.bashrc ] || mount --bind /dev/null ~/.bashrc",
            *(f"mount -t tmpfs tmpfs '{folder}'" for folder in self.hide.get(name, ())),
            f"exec /usr/sbin/sshd -D -e -f '{self.folder}/sshd_config'",
        ]
        enter = [
            "ip",
            "netns",
            "exec",
            space,
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
        ]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*enter, "sh", "-ec", "\n".join(steps)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.hosts.append(Host(name, f"{self.subnet}.{number}", process))

    def _wait(self, host: Host) -> None:
        deadline = time.monotonic() + _START
        while True:
            probe = subprocess.run(
                [*self.ssh, host.address, "hostname"], check=False, capture_output=True, text=True
            )
            if probe.stdout.strip().endswith(host.name):
                return
            if time.monotonic() > deadline or host.process.poll() is not None:
                log = (self.folder / f"{host.name}.log").read_text()
                raise RuntimeError(f"host {host.name} does not answer: {probe.stderr}{log}")
            time.sleep(0.05)


@contextlib.contextmanager
def made(
    folder: Path, names: Sequence[str], hide: dict[str, Sequence[str]] | None = None, **settings: str
) -> Iterator[Hosts]:
    """Yield started hosts, and always close them."""
    hosts = Hosts(folder, names, hide or {}, settings)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300).stdout


def _free_subnet() -> str:
    """Return an unused network of 198.18.0.0/15, which is reserved for tests."""
    used = {
        info.get("local", "").rpartition(".")[0]
        for link in json.loads(_run("ip", "-j", "addr"))
        for info in link.get("addr_info", [])
    }
    start = uuid.uuid4().int
    candidates = (f"198.{18 + (start + step) // 256 % 2}.{(start + step) % 256}" for step in range(512))
    return next(subnet for subnet in candidates if subnet not in used)


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _children_pid_namespace(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/pid_for_children").readlink()
