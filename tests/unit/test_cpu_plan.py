"""The CPU plan on machines of every kind, as files below a folder."""

from pathlib import Path

import pytest

from manycpu.pipeline.spec.cpu_plan import THREAD_VARIABLES, Machine, plan


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def status(cpus: str) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\n"}


V2 = {"proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"}
V1 = {
    "proc/self/mountinfo": "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "proc/self/cgroup": "4:memory:/other\n2:cpu,cpuacct:/pod/app\n",
}


def test_a_whole_machine(tmp_path: Path) -> None:
    cores = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": text
        for cpu in range(8)
        for name, text in {
            "physical_package_id": f"{cpu % 2}\n",
            "thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n",
        }.items()
    }
    machine = Machine.observe(tree(tmp_path, status("0-7") | V2 | {"proc/self/cgroup": "0::/\n"} | cores))
    assert machine == Machine(cpus=tuple(range(8)), quota=None, sockets=2, threads_per_core=2)
    assert machine.cores == 8


def test_the_tightest_quota_above_counts_in_version_2(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "0::/kubepods/pod1/app\n",
        "sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/kubepods/pod1/app/cpu.max": "400000 100000\n",
    }
    machine = Machine.observe(tree(tmp_path, status("0-63") | V2 | limits))
    assert machine.cores == 3.5


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
    }
    assert Machine.observe(tree(tmp_path, status("0-15") | V1 | limits)).cores == cores


def test_the_cpuset_counts_where_it_is_tighter(tmp_path: Path) -> None:
    limits = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "800000 100000\n"}
    machine = Machine.observe(tree(tmp_path, status("2-3,7") | V2 | limits))
    assert machine.cpus == (2, 3, 7)
    assert machine.cores == 3


def test_this_machine_grants_no_more_than_its_affinity() -> None:
    machine = Machine.observe()
    assert 0 < machine.cores <= len(machine.cpus)


def test_a_system_without_these_files_has_one_core(tmp_path: Path) -> None:
    assert Machine.observe(tmp_path).cores == 1


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(8, 1, 8), (8, 3, 2), (3, 2, 1), (2, 4, 1), (112, 2, 56)]
)
def test_threads_are_the_floor(cores: int, processes: int, threads: int) -> None:
    made = plan(Machine(cpus=tuple(range(cores))), processes)
    assert made.threads == threads
    assert made.env == dict.fromkeys(THREAD_VARIABLES, str(threads))


def test_the_run_may_ask_for_less_and_never_gets_more() -> None:
    machine = Machine(cpus=tuple(range(8)), quota=6.5)
    assert plan(machine, 2, cpus=4).threads == 2
    greedy = plan(machine, 2, cpus=64)
    assert greedy.threads == 3
    assert greedy.warnings == ("run.resources.cpu asks for 64 cores; this node grants 6.5, which are used",)


def test_the_user_wins_with_a_warning() -> None:
    made = plan(Machine(cpus=(0, 1)), 2, user_env={"OMP_NUM_THREADS": "4", "PATH": "/bin"})
    assert made.threads == 4
    assert "OMP_NUM_THREADS" not in made.env
    assert made.env["MKL_NUM_THREADS"] == "4"
    (warning,) = made.warnings
    assert warning.startswith("run.env: OMP_NUM_THREADS=4 wins over the CPU plan's 1")
    assert ("OMP_NUM_THREADS", "4", "run.env") in made.rows()


def test_a_user_who_says_the_same_is_not_warned() -> None:
    assert plan(Machine(cpus=(0, 1)), 2, user_env={"OMP_NUM_THREADS": "1"}).warnings == ()


def test_oversubscription_is_said() -> None:
    assert plan(Machine(cpus=(0, 1)), 4).warnings == ("4 processes share 2 cores: oversubscribed",)


def test_rows_name_every_number() -> None:
    rows = {row.name: row.value for row in plan(Machine(cpus=tuple(range(4)), quota=3.0), 2).rows()}
    assert rows["granted"] == "3"
    assert rows["threads"] == "1"
    assert rows["OMP_NUM_THREADS"] == "1"
