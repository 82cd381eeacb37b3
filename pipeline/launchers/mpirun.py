"""mpirun with the options of Intel MPI, MPICH and Open MPI (4 and 5): on this machine, or on hosts over ssh.

The values of variables are never in an argument list: mpirun has them in its own environment, and its
arguments name them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from manycpu.pipeline.launchers.environment import environment, node_command
from manycpu.pipeline.spec.errors import BadInputError, LaunchError
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.spec.training_run import TrainingRun

UNSUPPORTED = {
    "env_from": "secrets by name exist on Kubernetes only; set the variable in the worker's environment",
    "resources.memory": "memory cannot be limited by mpirun",
    "max_restarts": "mpirun ends all ranks when one fails; the task's retries start from the last checkpoint",
}

HOSTFILE: Final = "hostfile"  # its name in the attempt's folder
_NO_ALLOCATION: Final = "^slurm,pbs,tm,lsf,gridengine"
"""The readers of allocations that Open MPI leaves out."""
_ON_LOCALHOST: Final = ["-hosts", "localhost"]
"""Makes Hydra, which starts the ranks of Intel MPI and MPICH, ignore an allocation, such as Slurm's."""


class _Dialect(NamedTuple):
    """How one MPI starts the ranks."""

    options: list[str]
    """Options of mpirun, before the number of processes."""
    env: dict[str, str]
    """Variables of mpirun itself, which the ranks do not get."""
    hostfile: str = ""
    """The content of the hostfile; empty: the ranks run on this machine."""


def objects(run: TrainingRun, target: Local | BareMetal, placement: Placement) -> list[dict[str, Any]]:
    """Return one command, ``{argv, env, cwd, files}``, that starts the ranks by mpirun.

    ``env`` is the environment of mpirun; ``files`` maps a name in the attempt's folder to its content.

    Raises:
        BadInputError: A range of nodes; or a word that mpirun would split, or read as a separator.
        LaunchError: No MPI was found.
    """
    mpi = placement.mpi
    if mpi is None:
        raise LaunchError("mpirun needs an MPI, and none was found", field="target.mpi")
    _check_run(run)
    rendezvous = {"MASTER_ADDR": placement.master_addr, "MASTER_PORT": str(placement.master_port)}
    # None: mpirun starts the ranks on this machine, by fork; else on hosts, by ssh.
    remote = None if isinstance(target, Local) else target
    if remote is not None and remote.interface:
        rendezvous["GLOO_SOCKET_IFNAME"] = remote.interface
    rank_env = environment(run, placement) | rendezvous | mpi.env  # the user's variables are in environment()
    # The names: mpirun passes the variables with these names on to the ranks.
    dialect = _DIALECTS[mpi.family](run, remote, placement, sorted(rank_env))
    # The dialect's variables are for mpirun, not for the ranks. The user's come again, last, to win over all.
    mpirun_env = dialect.env | rank_env | run.env
    if mpi.family == "mpich":
        # With -genvlist, MPICH 4.0.2 loses the last variable of its environment: add one that no rank needs.
        mpirun_env["MANYCPU_LAST"] = "1"
    processes = run.processes * (len(placement.hosts) or 1)  # no hosts: this machine alone
    words = [*dialect.options, "-n", str(processes), placement.python, *node_command(run, placement)]
    return [
        {
            "argv": [mpi.mpirun, *words],
            "env": mpirun_env,
            "cwd": placement.code,
            "files": {HOSTFILE: dialect.hostfile} if dialect.hostfile else {},
        }
    ]


def _check_run(run: TrainingRun) -> None:
    """Raise BadInputError for a range of nodes, and for an argument that mpirun takes as a separator."""
    if run.elastic:
        raise BadInputError(
            f"mpirun starts a fixed number of nodes, not {run.nnodes}",
            field="run.nnodes",
            fix="Give one number",
        )
    if ":" in run.args:
        raise BadInputError(
            "mpirun takes ':' as the end of the program's arguments",
            field="run.args",
            fix="Join it to another word, as in --separator=:",
        )


def _intel(run: TrainingRun, remote: BareMetal | None, placement: Placement, names: list[str]) -> _Dialect:
    """Build options, variables and hostfile for Intel MPI's mpirun; :data:`_DIALECTS` has the arguments."""
    env = {"I_MPI_PIN": "off"}  # the node's CPU plan decides where threads run
    if remote is None:  # the ranks run on this machine, and inherit the variables
        return _Dialect(_ON_LOCALHOST, env | {"I_MPI_HYDRA_BOOTSTRAP": "fork"})
    ssh_program, ssh_options = _ssh_command(remote)
    env |= {
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": ssh_program,
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": ssh_options,
    }
    interface = remote.interface or placement.launcher_interface
    # The hosts connect back to an address: they often cannot resolve this machine's name.
    connect_back = ["-iface", interface] if interface else []
    options = [*_hydra_options(run, placement, names), *connect_back]
    return _Dialect(options, env, _hydra_hosts(run, placement))


def _mpich(run: TrainingRun, remote: BareMetal | None, placement: Placement, names: list[str]) -> _Dialect:
    """Build options, variables and hostfile for MPICH's mpirun; :data:`_DIALECTS` has the arguments."""
    binding = ["-bind-to", "none"]  # the node's CPU plan decides where threads run
    if remote is None:  # the ranks run on this machine, and inherit the variables
        return _Dialect([*binding, "-launcher", "fork", *_ON_LOCALHOST], {})
    ssh_program, ssh_options = _ssh_command(remote)
    # Renamed between versions 3 and 4; each version ignores the other name.
    env = dict.fromkeys(("HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS"), ssh_options)
    launcher = ["-launcher", "ssh", "-launcher-exec", ssh_program]
    # The hosts connect back to an address: they often cannot resolve this machine's name.
    connect_back: list[str] = []
    if placement.launcher_address:
        connect_back = ["-localhost", placement.launcher_address]
    elif placement.launcher_interface:
        connect_back = ["-iface", placement.launcher_interface]
    options = [*_hydra_options(run, placement, names), *binding, *launcher, *connect_back]
    return _Dialect(options, env, _hydra_hosts(run, placement))


def _openmpi(run: TrainingRun, remote: BareMetal | None, placement: Placement, names: list[str]) -> _Dialect:
    """Build options, variables and hostfile for Open MPI's mpirun; :data:`_DIALECTS` has the arguments."""
    # Version 5 reads PRTE_* where version 4 reads OMPI_*; each ignores the other's.
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    binding = ["--bind-to", "none"]  # the node's CPU plan decides where threads run
    if remote is None:  # the ranks run on this machine
        # A scheduler's allocation, such as Slurm's, may lack this machine, or have fewer slots.
        env |= {"OMPI_MCA_ras": _NO_ALLOCATION, "PRTE_MCA_ras": _NO_ALLOCATION}
        return _Dialect([*binding, "--host", f"localhost:{run.processes}"], env)
    # The command by which Open MPI reaches a host: a colon separates it from the next one to try.
    agent = " ".join(_ssh_command(remote, allows_colons=False))
    env |= {
        "OMPI_MCA_plm_rsh_agent": agent,
        "PRTE_MCA_plm_ssh_agent": agent,
        # This machine connects to each host: hosts need no keys for one another.
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        # Keep the names of the hostfile: cut at the first dot, ssh may not find the host.
        "OMPI_MCA_orte_keep_fqdn_hostnames": "1",
        "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
    }
    if remote.interface:
        env["OMPI_MCA_oob_tcp_if_include"] = remote.interface
        env["OMPI_MCA_btl_tcp_if_include"] = remote.interface
        env["PRTE_MCA_prte_if_include"] = remote.interface
    options = [
        "--hostfile",  # without it version 5 runs one node and reports success
        f"{placement.attempt_directory}/{HOSTFILE}",
        "--map-by",
        f"ppr:{run.processes}:node",  # processes per resource: that many ranks on each node
        "-wdir",
        placement.code,
    ]
    for name in names:
        options += ["-x", name]
    hosts = "".join(f"{host.name} slots={run.processes}\n" for host in placement.hosts)
    return _Dialect([*binding, *options], env, hosts)


_DIALECTS: Final[Mapping[str, Callable[[TrainingRun, BareMetal | None, Placement, list[str]], _Dialect]]] = {
    "intel": _intel,
    "mpich": _mpich,
    "openmpi": _openmpi,
}
"""Family of an MPI -> function that builds its options.

The arguments are: the run; the target whose hosts are reached by ssh, or None if ranks run on this machine;
the placement; and the names of the variables that mpirun passes on to the ranks.
"""


def _hydra_options(run: TrainingRun, placement: Placement, names: list[str]) -> list[str]:
    """Build the options that Intel MPI and MPICH share, as both use Hydra; ``names`` are of the variables.

    Raises:
        BadInputError: The name of a variable has a comma in it.
    """
    names_with_comma = [name for name in names if "," in name]
    if names_with_comma:
        raise BadInputError(
            f"mpirun splits the name {names_with_comma[0]!r} at its comma",
            field="run.env",
            fix="Give the variable a name without a comma",
        )
    return [
        "-f",
        f"{placement.attempt_directory}/{HOSTFILE}",
        "-ppn",
        str(run.processes),
        "-wdir",
        placement.code,
        "-genvlist",
        ",".join(names),
    ]


def _hydra_hosts(run: TrainingRun, placement: Placement) -> str:
    """Write the hostfile of Intel MPI and MPICH: on each line a host, and how many ranks it gets."""
    return "".join(f"{host.name}:{run.processes}\n" for host in placement.hosts)


def _ssh_command(target: BareMetal, *, allows_colons: bool = True) -> tuple[str, str]:
    """Return the ssh program, and its options as one text, which every MPI splits at blanks.

    Raises:
        BadInputError: A word has a blank in it, or a colon that is not allowed.
    """
    for word in target.ssh:
        if len(word.split()) != 1:
            problem = "blank"
        elif ":" in word and not allows_colons:
            problem = "colon"
        else:
            continue
        raise BadInputError(
            f"mpirun cannot pass on {word!r}, which has a {problem} in it",
            field="target.ssh",
            fix="Put the option into ~/.ssh/config",
        )
    # BatchMode: ssh fails where it would ask for a password, since mpirun has no terminal for that.
    return target.ssh[0], " ".join([*target.ssh[1:], "-o", "BatchMode=yes"])
