"""Training on real hosts over ssh: namespaces with a name, an address and an sshd each."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import namespace_hosts as made_hosts
from support.killable_programs import Program
from support.rank_launches import LIGHT
from support.training_scripts import ALL_REDUCE
from support.waiting import until

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import hosts as on_hosts
from manycpu.pipeline.adapters import mpi, ssh, ssh_copies
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.launchers import mpirun
from manycpu.pipeline.node.function import versions
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import BadInputError, ExportError, LaunchError
from manycpu.pipeline.spec.event_types import decode
from manycpu.pipeline.spec.placement import Host, Placement
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.spec.training_run import TrainingRun

MPIS = {"intel": None, "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}

pytestmark = pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")


@pytest.fixture(autouse=True)
def hosts_are_free(hosts: made_hosts.Hosts) -> Iterator[None]:
    """See that no test leaves a process on a host."""
    yield
    free(hosts)


def free(hosts: made_hosts.Hosts) -> None:
    """Wait until nothing runs on any host; what still does is killed, for the sake of the other tests."""
    try:
        until(lambda: not any(host.processes() for host in hosts.hosts))
    except AssertionError:
        left = {host.name: host.processes() for host in hosts.hosts}
        for pid in (pid for found in left.values() for pid in found):
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"these still run: {left}")


def target_of(hosts: made_hosts.Hosts, **fields: Any) -> BareMetal:
    """Name both hosts; skip where the MPI is not installed."""
    if (wanted := fields.get("mpi")) and shutil.which(wanted) is None:
        pytest.skip(f"there is no {wanted} (tests/system-packages installs it)")
    known = {"hostfile": str(hosts.hostfile("node-a", "node-b")), "ssh": hosts.ssh}
    return BareMetal(**known | fields)


def prepare(tmp_path: Path, target: BareMetal, script: str = ALL_REDUCE, **fields: Any) -> dict[str, Any]:
    """Describe a run of a script on the hosts as the launch verb does."""
    known = {"nnodes": 2, "start_timeout": 40} | fields
    run = TrainingRun(program="train.py", output=str(tmp_path / "model"), **known)
    folders = {name: tmp_path / name for name in ("code", "output", "attempt")}
    for folder in folders.values():
        folder.mkdir()
    (folders["code"] / "train.py").write_text(script)
    placement = Placement(
        name="train-0123456789",
        attempt=1,
        code=str(folders["code"]),
        program=("train.py",),
        output=str(folders["output"]),
        checkpoints=str(tmp_path / "checkpoints"),
        caches=str(tmp_path / "caches"),
        attempt_directory=str(folders["attempt"]),
        mpi=mpi.find(target.mpi),
        **on_hosts.placement(target, run),
    )
    [manifest] = mpirun.objects(run, target, placement)
    for name, text in manifest["files"].items():
        (folders["attempt"] / name).write_text(text)
    return manifest


def start(tmp_path: Path, target: BareMetal, script: str = ALL_REDUCE, **fields: Any) -> Program[str]:
    """Start a script on the hosts from this machine."""
    manifest = prepare(tmp_path, target, script, **fields)
    return Program(
        manifest["argv"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]} | manifest["env"],
        cwd=manifest["cwd"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(out: str) -> list[dict[str, Any]]:
    """Find the events among lines."""
    lines = [events.split(line) for line in out.splitlines()]
    decoded = [(line, decode(line.text)) for line in lines]
    return [
        {"at": (line.rank, line.host), **event.model_dump(exclude_unset=True)}
        for line, event in decoded
        if event is not None
    ]


@pytest.mark.parametrize("family", MPIS)
def test_two_hosts_train_together(family: str, hosts: made_hosts.Hosts, tmp_path: Path) -> None:
    """Every MPI brings both hosts, the run's variables and no others, and the ranks add up.

    By torch's gloo under one of them: what gloo finds there, its interface included, is the same under all.
    """
    script = ALL_REDUCE + "print('given', os.environ['WORDS'], os.environ.get('NOT_OURS'), os.getcwd())\n"
    script += "print('gloo has', os.environ['GLOO_SOCKET_IFNAME'] in dict(socket.if_nameindex()).values())\n"
    target = target_of(hosts, mpi=MPIS[family])
    env = {"WORDS": "two words, $HOME"} | ({} if family == "intel" else LIGHT)
    process = start(tmp_path, target, f"import socket\n{script}", env=env, spread="require")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    proofs = [event for event in said(out) if event["event"] == "proof"]
    assert {event["at"] for event in proofs} == {(0, "node-a"), (1, "node-b")}
    assert sum("sum 2" in line for line in out.splitlines()) == 2
    assert out.count(f"given two words, $HOME None {tmp_path}/code") == 2
    assert out.count("gloo has True") == 2
    assert (tmp_path / "output" / "model.txt").read_text() == "sum 2"


MEETS = """
import torch.distributed as dist
dist.init_process_group()
print("rank", dist.get_rank(), "of", dist.get_world_size())
"""
FROM_A_HOST = """
import os, subprocess, sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_hosts
from support.rank_launches import LIGHT
from manycpu.pipeline.spec.targets import BareMetal
target = BareMetal.model_validate_json({target!r})
fields = dict(nproc_per_node=2, oversubscribe=True, env=LIGHT)
made = test_hosts.prepare(Path({folder!r}), target, test_hosts.MEETS, **fields)
done = subprocess.run(made["argv"], env={{**os.environ, **made["env"]}}, cwd=made["cwd"], timeout=300,
                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(done.stdout, "ended with", done.returncode)
"""


@pytest.mark.parametrize("family", MPIS)
def test_the_launcher_may_be_one_of_the_hosts(family: str, hosts: made_hosts.Hosts, tmp_path: Path) -> None:
    """Started on node-a, with two ranks there and two on node-b."""
    here = Path(__file__).parent
    text = FROM_A_HOST.format(
        path=[str(here.parent), str(here)],
        target=target_of(hosts, mpi=MPIS[family]).model_dump_json(),
        folder=str(tmp_path),
    )
    (tmp_path / "launch.py").write_text(text)
    out = hosts["node-a"].run(sys.executable, str(tmp_path / "launch.py"))
    assert out.strip().endswith("ended with 0"), out
    assert sum("of 4" in line for line in out.splitlines()) == 4
    placed = {event["at"] for event in said(out) if event["event"] == "proof"}
    assert placed == {(0, "node-a"), (1, "node-a"), (2, "node-b"), (3, "node-b")}


@pytest.mark.parametrize("family", MPIS)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_mpirun(
    family: str, how: signal.Signals, hosts: made_hosts.Hosts, tmp_path: Path
) -> None:
    """However mpirun dies, the hosts are free again within seconds, also of what the script started."""
    script = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('busy')\ntime.sleep(600)\n"
    process = start(tmp_path, target_of(hosts, mpi=MPIS[family]), script, env=LIGHT)
    assert process.stdout is not None
    busy = 0
    for line in process.stdout:
        busy += line.endswith("busy\n")
        if busy == 2:
            break
    assert busy == 2
    assert all(host.processes() for host in hosts.hosts)
    process.send_signal(how)
    process.communicate(timeout=300)
    free(hosts)


@pytest.mark.parametrize("family", MPIS)
def test_a_failed_rank_ends_those_on_other_hosts(
    family: str, hosts: made_hosts.Hosts, tmp_path: Path
) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(600)\n"
    process = start(tmp_path, target_of(hosts, mpi=MPIS[family]), script, env=LIGHT)
    out, _ = process.communicate(timeout=300)
    # Intel's mpirun may die itself, of the pipe to a proxy that it has just ended.
    assert process.returncode in ((3, -signal.SIGPIPE) if family == "intel" else (3,)), out
    assert {"at": (1, "node-b"), "event": "exit", "code": 3, "rank": 1, "host": "node-b"} in said(out)


def test_fewer_hosts_than_nodes(hosts: made_hosts.Hosts, tmp_path: Path) -> None:
    """The hostfile has one host only: said before anything starts."""
    with pytest.raises(BadInputError, match=r"run\.nnodes.* 2 nodes were asked for"):
        start(tmp_path, target_of(hosts, hostfile=str(hosts.hostfile("node-a"))))


def test_a_host_that_cannot_be_reached(hosts: made_hosts.Hosts, tmp_path: Path) -> None:
    nowhere = tmp_path / "hosts"
    nowhere.write_text(f"{hosts['node-a'].address}\n{hosts.subnet}.99\n")
    run = TrainingRun(program="train.py", output="/model", nnodes=2)
    target = target_of(hosts, hostfile=str(nowhere))
    (finding,) = on_hosts.check(target, run, mpi.find(None))
    assert finding.field == "target.hostfile"
    assert f"{hosts.subnet}.99 cannot be reached" in finding.message
    assert "works without a password" in finding.fix
    with pytest.raises(LaunchError, match="cannot be reached"):
        ssh.make_folder(target, [Host(f"{hosts.subnet}.99")], tmp_path)


def test_hosts_that_are_ready_have_no_findings(hosts: made_hosts.Hosts) -> None:
    run = TrainingRun(program="train.py", output="/model", nnodes=2)
    assert on_hosts.check(target_of(hosts), run, mpi.find(None)) == []


def test_hosts_with_another_torch_than_the_notebook_are_named(hosts: made_hosts.Hosts) -> None:
    run = TrainingRun(program="train.py", output="/model", nnodes=2)
    (finding,) = on_hosts.check(target_of(hosts), run, mpi.find(None), versions() | {"torch": "1.0"})
    assert finding.field == "target.python"
    assert "and the notebook 1.0" in finding.message


def test_a_host_without_the_program(hosts: made_hosts.Hosts, tmp_path: Path) -> None:
    """No Python at the path, and a Python without torch and manycpu: each says what to install."""
    run = TrainingRun(program="train.py", output="/model", nnodes=2)
    findings = on_hosts.check(target_of(hosts, python="/opt/none/bin/python"), run, None)
    assert [finding.field for finding in findings] == ["target.python"] * 2
    assert "cannot run /opt/none/bin/python" in findings[0].message
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    findings = on_hosts.check(target_of(hosts, python=str(bare / "bin/python")), run, None)
    assert {finding.message.rsplit(" ", 1)[-1] for finding in findings} == {"manycpu", "torch"}


def test_a_host_without_the_mpi(hosts: made_hosts.Hosts, hidden: Path) -> None:
    mpirun_here = hidden / "mpirun"
    mpirun_here.touch()
    run = TrainingRun(program="train.py", output="/model", nnodes=2)
    there = mpi.find(None).model_copy(update={"mpirun": str(mpirun_here)})
    (finding,) = on_hosts.check(target_of(hosts), run, there)
    assert finding.field == "target.mpi"
    assert f"host {hosts['node-b'].address} has no {mpirun_here}" in finding.message


def test_a_host_of_two_names(hosts: made_hosts.Hosts, tmp_path: Path) -> None:
    """Two names of one host pass the hostfile's reader and are found out on the host."""
    config = tmp_path / "config"
    config.write_text(f"Host alias-1 alias-2\n  HostName {hosts['node-a'].address}\n")
    (tmp_path / "hosts").write_text("alias-1\nalias-2\n")
    words = ["ssh", "-F", str(config), *hosts.ssh[3:]]
    target = target_of(hosts, hostfile=str(tmp_path / "hosts"), ssh=words)
    run = TrainingRun(program="train.py", output="/model", nnodes=2)
    (finding,) = on_hosts.check(target, run, mpi.find(None))
    assert "alias-1 and alias-2 are names of one host" in finding.message


def test_a_terminal_that_the_config_of_ssh_forces_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("RequestTTY force\n")
    shows_settings = ("ssh", "-G", "-F", str(tmp_path / "config"))
    done = ssh.run(BareMetal(hostfile="hosts", ssh=shows_settings), Host("node-a"), ["true"])
    assert "requesttty false\n" in done.out


def delivery_of(folder: Path, run: str) -> ssh_copies.Delivery:
    """Describe a folder of this machine as what a run needs on the hosts."""
    scanned = transfer.scan(Location.of(str(folder), "run.data"))
    files = {file.path: file.sha256 for file in scanned.files}
    return ssh_copies.Delivery(folder, files, folder.parents[1] / "runs" / run)


def delivered(hosts: made_hosts.Hosts, folder: Path, run: str, *, trained_on: bool = False) -> Any:
    """Deliver a folder to both hosts."""
    target = target_of(hosts)
    both = on_hosts.chosen(target, TrainingRun(program="train.py", output="/model", nnodes=2))
    return ssh_copies.deliver(target, both, delivery_of(folder, run), lambda: trained_on)


@pytest.fixture
def folder(hidden: Path, request: pytest.FixtureRequest) -> Path:
    """Make a folder with files of nasty names, and one that is empty, which node-b does not see."""
    folder = hidden / "data" / str(request.node.name)
    (folder / "deep er").mkdir(parents=True)
    (folder / "deep er" / "a file").write_text("content")
    (folder / "-rf\n*").write_text("nasty")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).write_text("not UTF-8")
    (folder / "nothing in it").mkdir()
    return folder


def test_folders_reach_the_hosts_that_do_not_see_them(hosts: made_hosts.Hosts, folder: Path) -> None:
    """Node-a shares this machine's files and gets no copy; node-b gets one, whole and once."""
    assert delivered(hosts, folder, "run-1") == ([hosts["node-b"].address], [])
    assert delivered(hosts, folder, "run-2") == ([], [])
    there = hosts["node-b"]
    assert there.run("cat", str(folder / "deep er" / "a file")) == "content"
    assert there.run("ls", str(folder / "nothing in it")) == ""
    assert there.run("ls", f"{folder.parents[1]}/runs/run-1/deliveries") == ""


def test_only_the_files_of_the_manifest_are_sent_and_compared(hosts: made_hosts.Hosts, folder: Path) -> None:
    there, delivery = hosts["node-b"], delivery_of(folder, "run-1")
    (folder / "later").write_text("none of it")
    target = target_of(hosts, hostfile=str(hosts.hostfile("node-b")))
    one = [Host(there.address)]
    assert ssh_copies.deliver(target, one, delivery, lambda: False).copied == [there.address]
    assert there.run("find", str(folder), "-name", "later") == ""
    there.run("sh", "-c", f"mkdir '{folder}/__pycache__' && touch '{folder}/__pycache__/x.pyc'")
    assert ssh_copies.deliver(target, one, delivery, lambda: False).copied == []
    assert there.run("ls", f"{folder}/__pycache__") == "x.pyc\n"


def test_what_a_run_uses_on_a_host_is_not_replaced(hosts: made_hosts.Hosts, folder: Path) -> None:
    """Of another machine's run the host's notes tell, of this machine's its ledgers too."""
    there, file = hosts["node-b"], f"{folder}/deep er/a file"
    assert delivered(hosts, folder, "run-1").copied == [there.address]
    there.run("sh", "-c", f"echo changed >'{file}'")
    assert delivered(hosts, folder, "run-2") == ([], [f"{there.address} (run-1)"])
    assert there.run("cat", file) == "changed\n"
    runs = f"{folder.parents[1]}/runs"
    there.run("rm", "-r", f"{runs}/run-1")
    assert delivered(hosts, folder, "run-2", trained_on=True).in_use
    assert delivered(hosts, folder, "run-2") == ([there.address], [])
    assert there.run("cat", file) == "content"
    assert there.run("ls", f"{runs}/run-2/deliveries") == ""


def test_deliveries_side_by_side_do_not_meet(hosts: made_hosts.Hosts, folder: Path) -> None:
    (folder / "large").write_bytes(os.urandom(32 << 20))
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(delivered, hosts, folder, f"run-{number}") for number in range(3)]
    assert {tuple(run.result().in_use) for run in runs} == {()}
    there = hosts["node-b"].run("sha256sum", f"{folder}/large").split()[0]
    assert there == hashlib.sha256((folder / "large").read_bytes()).hexdigest()


def test_what_is_used_in_place_must_be_the_same_on_every_host(
    hosts: made_hosts.Hosts, hidden: Path, tmp_path: Path
) -> None:
    target = target_of(hosts)
    both = on_hosts.chosen(target, TrainingRun(program="train.py", output="/model", nnodes=2))

    def lacking(place: Path) -> list[str]:
        scanned = transfer.scan(Location.of(str(place), "run.data"))
        return ssh_copies.hosts_without(
            target, both, place, {file.path: file.sha256 for file in scanned.files}
        )

    for folder in (tmp_path / "shared", hidden / "own"):
        folder.mkdir()
        (folder / "a file").write_text("content")
        (folder / "linked").symlink_to("a file")
    assert lacking(tmp_path / "shared") == lacking(tmp_path / "shared" / "a file") == []
    assert lacking(hidden / "own") == lacking(hidden / "own" / "a file") == [hosts["node-b"].address]


def test_output_comes_back_from_all_hosts(hosts: made_hosts.Hosts, hidden: Path) -> None:
    """Node-a shares this machine's files, node-b has its own: shards of both, links included."""
    target = target_of(hosts)
    both = on_hosts.chosen(target, TrainingRun(program="train.py", output="/model", nnodes=2))
    output, address = hidden / "output", hosts["node-b"].address
    ssh.make_folder(target, both, output)
    (output / "shard-0").write_text("of node-a")
    hosts["node-b"].run(
        "sh", "-c", f"cd {output} && mkdir deep && echo b >'deep/shard\n1' && ln -s deep latest"
    )
    assert ssh_copies.collect(target, both, output) == [address]
    assert (output / "shard-0").read_text() == "of node-a"
    assert (output / "latest" / "shard\n1").read_text() == "b\n"
    assert ssh_copies.collect(target, both, output) == []
    hosts["node-b"].run("sh", "-c", f"echo another >{output}/shard-0; echo more >{output}/more")
    with pytest.raises(ExportError, match=rf"^run\.output: .*{address}.* {output}/shard-0"):
        ssh_copies.collect(target, both, output)
    assert (output / "shard-0").read_text() == "of node-a"
    assert ssh.remove_folder(target, both, ssh.RunFolder(output, output / "owner", ""), 60) == []
    with pytest.raises(ExportError, match=f"has no folder {output}"):
        ssh_copies.collect(target, both, output)


def test_a_host_that_greets_is_understood(tmp_path: Path, hidden: Path) -> None:
    """A banner, and a login shell that prints before each command and does not end its line."""
    (tmp_path / "banner").write_text("Authorized use only.\n" * 3)
    (tmp_path / "rc").write_text('printf "Welcome to this host"\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    greets = {"Banner": str(tmp_path / "banner"), "ForceCommand": f"sh {tmp_path}/rc"}
    hide: dict[str, Sequence[str]] = {"node-c": [str(hidden)]}
    with made_hosts.made(tmp_path / "hosts", ["node-c"], hide, **greets) as made:
        # Each command has a connection of its own, and shows the banner.
        own = ("ssh", "-o", "ControlPath=none", *made.ssh[1:])
        words = tuple(word.replace("LogLevel=ERROR", "LogLevel=INFO") for word in own)
        target = BareMetal(hostfile=str(made.hostfile("node-c")), ssh=words)
        run = TrainingRun(program="train.py", output="/model")
        assert on_hosts.check(target, run, mpi.find(None)) == []
        one = on_hosts.chosen(target, run)
        greeted = hidden / "data" / "greeted"
        greeted.mkdir(parents=True)
        (greeted / "data").write_bytes(os.urandom(1 << 20))
        delivery = delivery_of(greeted, "run-1")
        assert ssh_copies.deliver(target, one, delivery, lambda: False).copied == [one[0].name]
        assert ssh_copies.deliver(target, one, delivery, lambda: False).copied == []
        made["node-c"].run("cp", f"{greeted}/data", f"{greeted}/model")
        assert ssh_copies.collect(target, one, greeted) == [one[0].name]
        assert (greeted / "model").read_bytes() == (greeted / "data").read_bytes()
