"""What a process may use of its machine, as files below a folder: cgroups of both versions, NUMA, holes."""

from pathlib import Path

import pytest

from manycpu.pipeline.spec.machine import Cpu, Machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def status(cpus: str) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\n"}


def topology(sockets: int, cores: int, nodes: int) -> dict[str, str]:
    """Write two hyper-threads a core, numbered as Linux does."""
    total = sockets * cores
    files = {}
    for number in range(2 * total):
        core = number % total
        folder = f"sys/devices/system/cpu/cpu{number}/topology"
        files[f"{folder}/physical_package_id"] = f"{core // cores}\n"
        files[f"{folder}/thread_siblings_list"] = f"{core},{core + total}\n"
    size = total // max(1, nodes)
    for node in range(nodes):
        low, high = node * size, (node + 1) * size - 1
        listed = f"{low}-{high},{low + total}-{high + total}\n"
        files[f"sys/devices/system/node/node{node}/cpulist"] = listed
    return files


V2 = {"proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"}
V1 = {
    "proc/self/mountinfo": "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "proc/self/cgroup": "4:memory:/other\n2:cpu,cpuacct:/pod/app\n",
}
POD = "99 31 8:1 /var/lib/kubelet/pods/1234/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"


def test_a_whole_machine(tmp_path: Path) -> None:
    files = status("0-15") | V2 | {"proc/self/cgroup": "0::/\n"} | topology(2, 4, 4)
    files["proc/meminfo"] = "MemTotal:       1048576 kB\n"
    machine = Machine.observe(tree(tmp_path, files))
    assert (machine.sockets, machine.nodes, machine.threads_per_core) == (2, 4, 2)
    assert (machine.processors, machine.cores) == (16, 8)
    assert machine.cpus[:3] == (Cpu(0, 0, 0, 0), Cpu(0, 0, 0, 8), Cpu(0, 0, 1, 1))
    assert (machine.quota, machine.guaranteed, machine.memory) == (None, None, 1 << 30)


def test_a_cpuset_with_holes_may_hold_one_hyper_thread_of_a_core(tmp_path: Path) -> None:
    machine = Machine.observe(tree(tmp_path, status("1,5-6,9") | topology(2, 4, 2)))
    assert [cpu.number for cpu in machine.cpus] == [1, 9, 5, 6]
    assert (machine.processors, machine.cores, machine.sockets) == (4, 3, 2)


def test_sockets_of_a_machine_without_numa_nodes_are_apart(tmp_path: Path) -> None:
    machine = Machine.observe(tree(tmp_path, status("0-15") | topology(2, 4, 0)))
    assert (machine.sockets, machine.sockets_apart) == (2, 2)


def test_processors_that_are_offline_do_not_count(tmp_path: Path) -> None:
    files = status("0-127") | topology(1, 2, 1) | {"sys/devices/system/cpu/offline": "4-127\n"}
    machine = Machine.observe(tree(tmp_path, files))
    assert (machine.processors, machine.cores) == (4, 2)


def test_mounts_without_a_source_and_of_any_name_hide_no_limit(tmp_path: Path) -> None:
    others = "90 23 0:50 / /x rw - tmpfs  rw,size=4k\n91 23 0:51 / /\udcff rw - tmpfs tmpfs rw\n"
    others += "92 23 0:52 / /a\u2028b\x0cc\rd rw - tmpfs tmpfs rw\n"
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    tree(tmp_path, status("0-15") | files)
    (tmp_path / "proc/self/mountinfo").write_text(
        others + V2["proc/self/mountinfo"], errors="surrogateescape"
    )
    assert Machine.observe(tmp_path).cores == 1.5


def test_the_tightest_quota_above_counts_in_version_2(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "0::/kubepods/pod1/app\n",
        "sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
        "sys/fs/cgroup/kubepods/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/kubepods/pod1/memory.max": "1073741824\n",
        "sys/fs/cgroup/kubepods/pod1/app/cpu.max": "400000 100000\n",
    }
    machine = Machine.observe(tree(tmp_path, status("0-63") | V2 | limits))
    assert (machine.cores, machine.memory) == (3.5, 1 << 30)


def test_inside_a_container_the_mount_is_the_cgroup(tmp_path: Path) -> None:
    """The path that the host sees is not there; the mount point shows this very cgroup."""
    shown = "31 23 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    files = {
        "proc/self/mountinfo": shown,
        "proc/self/cgroup": "0::/docker/abc/inner\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    assert Machine.observe(tree(tmp_path, status("0-15") | files)).cores == 1.5


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", 16.0)])
def test_version_1(quota: str, cores: float, tmp_path: Path) -> None:
    limits = {
        "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": f"{quota}\n",
        "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/other/memory.limit_in_bytes": "2147483648\n",
        "proc/meminfo": "MemTotal:       8388608 kB\n",
    }
    machine = Machine.observe(tree(tmp_path, status("0-15") | V1 | limits))
    assert (machine.cores, machine.memory) == (cores, 2 << 30)


def test_no_limit_of_version_1_is_no_memory_beyond_the_nodes(tmp_path: Path) -> None:
    limits = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "proc/meminfo": "MemTotal:       8388608 kB\n",
    }
    assert Machine.observe(tree(tmp_path, status("0") | V1 | limits)).memory == 8 << 30


@pytest.mark.parametrize(
    ("files", "guaranteed"),
    [
        ({"cpu.shares": "2048"}, True),
        ({"cpu.shares": "1024"}, False),
        ({"cpu.weight": "79"}, True),  # 2 processors, as runc wrote it before 1.3.2
        ({"cpu.weight": "174"}, True),  # and since
        ({"cpu.weight": "39"}, False),
        ({}, None),
    ],
)
def test_a_pods_share_tells_whether_it_requests_its_limit(
    files: dict[str, str], guaranteed: bool | None, tmp_path: Path
) -> None:
    mount = "/sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu" if "cpu.shares" in files else None
    shown = f"31 23 0:28 / {mount or '/sys/fs/cgroup/cpu rw - cgroup2 cgroup2 rw'}\n{POD}"
    limits = {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"} if mount else {}
    files = files | limits | ({} if mount else {"cpu.max": "200000 100000"})
    below = {f"sys/fs/cgroup/cpu/{name}": f"{text}\n" for name, text in files.items()}
    known = {"proc/self/mountinfo": shown, "proc/self/cgroup": "2:cpu:/\n0::/\n"}
    assert Machine.observe(tree(tmp_path, status("0-7") | known | below)).guaranteed is guaranteed


def test_outside_of_pods_a_share_says_nothing(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/cpu.weight": "100\n",
    }
    assert Machine.observe(tree(tmp_path, status("0-7") | V2 | limits)).guaranteed is None


def test_this_machine_grants_no_more_than_its_affinity() -> None:
    machine = Machine.observe()
    assert 0 < machine.cores <= machine.processors <= len(machine.cpus)


def test_a_system_without_these_files_has_one_core(tmp_path: Path) -> None:
    machine = Machine.observe(tmp_path)
    assert (machine.cores, machine.memory, machine.shm) == (1, None, None)
