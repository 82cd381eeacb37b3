"""MPIJobs: golden manifests in the dialects of three MPIs, and the traps of the mpi-operator."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.golden import differences, golden
from support.job_manifests import (
    MANY_FIELDS,
    annotation,
    command,
    container,
    manifest,
    place,
    pod,
    run,
    target,
    templates,
    variables,
)
from support.killable_programs import Program
from support.rank_launches import free_port
from support.waiting import until

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import mpijob
from manycpu.pipeline.spec.errors import BadInputError

MPIS = ("intel", "openmpi", "mpich")


def written(mpi: str) -> str:
    return as_yaml(manifest("mpijob", MANY_FIELDS | {"mpi": mpi}, env={"GREETING": "good morning"}))


def test_golden_mpijob() -> None:
    assert written("openmpi") == golden("mpijob.yaml", written("openmpi"))


@pytest.mark.parametrize("mpi", ["intel", "mpich"])
def test_golden_differences_of_a_dialect(mpi: str) -> None:
    other = differences(written("openmpi"), written(mpi))
    assert other == golden(f"mpijob-{mpi}.diff", other)


def test_the_mpi_launcher_needs_no_machine_of_its_own() -> None:
    job = manifest("mpijob", spread="require")
    labels = templates(job)["launcher"]["metadata"]["labels"]
    (term,) = pod(job)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert not term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert "affinity" not in pod(job, "launcher")


def test_sshd_of_workers_ends_with_the_job() -> None:
    assert manifest("mpijob")["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"


def test_the_launcher_starts_when_sshd_answers() -> None:
    job = manifest("mpijob")
    assert job["spec"]["launcherCreationPolicy"] == "AtStartup"  # and waits for them itself
    port = container(job)["startupProbe"]["tcpSocket"]["port"]
    assert f"Port {port}\n" in annotation(job, "rank", "sshd_config")
    assert port > 1023


def test_the_launcher_waits_for_every_sshd_to_speak_and_tells_ssh_their_addresses(tmp_path: Path) -> None:
    *words, _, _, _ = mpijob.await_workers()
    assert command(manifest("mpijob"), "launcher")[: len(words)] == words
    assert f"Include {mpijob.HOSTS}\n" in annotation(manifest("mpijob"), "launcher", "ssh_config")
    hostfile, hosts = tmp_path / "hostfile", tmp_path / "hosts"
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(("127.0.0.2", first.getsockname()[1]))
        hostfile.write_text("localhost:2\n127.0.0.2 slots=2\n")
        port = str(first.getsockname()[1])
        words = [sys.executable, *words[1:], str(hostfile), port, str(hosts), "echo", "all there"]
        with Program(words, stdout=subprocess.PIPE, text=True) as waiting:
            first.accept()[0].close()  # it listens, and does not speak yet
            with first.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            assert waiting.poll() is None
            second.listen()
            with second.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            printed, _ = waiting.communicate(timeout=60)
    assert printed == "all there\n"
    assert hosts.read_text() == (
        "Host localhost\n    HostName 127.0.0.1\nHost 127.0.0.2\n    HostName 127.0.0.2\n"
    )


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs sshd")
def test_a_worker_that_is_deleted_counts_as_failed(tmp_path: Path) -> None:
    job, port = manifest("mpijob"), str(free_port())
    config = annotation(job, "rank", "sshd_config").replace(str(mpijob.PORT), port)
    (tmp_path / "sshd_config").write_text(config.replace(mpijob.OWN, str(tmp_path)))
    start = (
        command(job)[-1]
        .replace("$$", "$")
        .replace("/etc/manycpu", str(tmp_path))
        .replace(f"{mpijob.OWN}/*", "")
    )
    start = "mkdir -p /run/sshd; " * (os.getuid() == 0) + start.replace(mpijob.OWN, str(tmp_path))
    with Program(["/bin/sh", "-c", start]) as worker:
        until(lambda: _speaks(int(port)))
        worker.terminate()
        assert worker.wait(60) == 143  # and not 0, as sshd itself


def _speaks(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("asked", "cpu", "limit", "memory"),
    [
        ({}, None, None, None),
        ({"cpu": 4, "memory": "8Gi"}, "50m", "500m", "288Mi"),
        ({"cpu": 4, "launcher_cpu": 0.2, "launcher_memory": "1Gi"}, "200m", "2", "1Gi"),
    ],
)
def test_the_launcher_asks_for_little(
    asked: dict[str, object], cpu: str | None, limit: str | None, memory: str | None
) -> None:
    resources = container(manifest("mpijob", resources=asked), "launcher")["resources"]
    assert resources.get("requests", {}).get("cpu") == cpu
    assert resources.get("limits", {}).get("cpu") == limit
    assert resources.get("requests", {}).get("memory") == memory


def test_keys_are_where_others_than_root_can_read_them() -> None:
    job = manifest("mpijob")
    folder = job["spec"]["sshAuthMountPath"]
    assert not folder.startswith("/root")
    assert f"AuthorizedKeysFile {folder}/authorized_keys\n" in annotation(job, "rank", "sshd_config")
    assert f"IdentityFile {folder}/id_rsa\n" in annotation(job, "launcher", "ssh_config")
    assert pod(job)["securityContext"]["fsGroup"] == pod(job)["securityContext"]["runAsGroup"]


def test_ssh_needs_no_options_that_the_operator_would_overwrite() -> None:
    job = manifest("mpijob", {"mpi": "openmpi"})
    assert variables(job, "launcher")["OMPI_MCA_plm_rsh_agent"].split()[0] == "ssh"
    paths = {mount["mountPath"] for mount in container(job, "launcher")["volumeMounts"]}
    assert "/etc/ssh/ssh_config" in paths


def test_a_workers_environment_crosses_ssh() -> None:
    job = manifest("mpijob", env_from=["hub"])
    start = command(job)[-1]
    (path,) = re.findall(r"export -p >(\S+);", start)
    assert f"ForceCommand . {path}; " in annotation(job, "rank", "sshd_config")
    (folder,) = [volume for volume in pod(job)["volumes"] if volume["name"] == "own"]
    assert folder["emptyDir"]["medium"] == "Memory"
    assert "envFrom" not in container(job, "launcher")


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_speaks_to_all_workers(mpi: str) -> None:
    job = manifest("mpijob", {"mpi": mpi}, nnodes=3)
    words = command(job, "launcher")
    assert "/etc/mpi/hostfile" in words
    assert words[words.index("-n") + 1] == "6"
    assert job["spec"]["slotsPerWorker"] == 2
    address = variables(job, "launcher")["MASTER_ADDR"]
    assert address == "train-0123456789-1-worker-0.train-0123456789-1.ml.svc"


@pytest.mark.parametrize("mpi", ["intel", "mpich"])
def test_workers_connect_back_to_an_address(mpi: str) -> None:
    words = command(manifest("mpijob", {"mpi": mpi}), "launcher")
    assert words[words.index("-iface") + 1] == "eth0"


def test_open_mpi_5_gets_its_hostfile_and_keeps_names_whole() -> None:
    job = manifest("mpijob", {"mpi": "openmpi"})
    words = command(job, "launcher")
    assert words[words.index("--hostfile") + 1] == "/etc/mpi/hostfile"
    assert variables(job, "launcher")["PRTE_MCA_prte_keep_fqdn_hostnames"] == "1"


def test_a_launcher_that_failed_keeps_its_log() -> None:
    job = manifest("mpijob", {"restart_policy": "OnFailure"}, max_restarts=2)
    assert job["spec"]["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "Never"
    assert job["spec"]["runPolicy"]["backoffLimit"] == 2


@pytest.mark.parametrize("mpi", MPIS)
def test_no_value_of_a_variable_is_an_argument(mpi: str) -> None:
    secret = "not-for-ps"  # noqa: S105 - it is none
    job = manifest("mpijob", {"mpi": mpi}, env={"WORD": secret})
    assert variables(job, "launcher")["WORD"] == secret
    assert not any(secret in word for word in command(job, "launcher"))


def test_an_mpijob_of_a_range_is_no_manifest() -> None:
    with pytest.raises(BadInputError, match=r"run\.nnodes: .*1:2"):
        mpijob.objects(run(nnodes="1:2"), target("mpijob"), place())
