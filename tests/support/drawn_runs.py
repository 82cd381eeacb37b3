"""Fields of runs and targets that hypothesis draws: values that people write, and values of any kind."""

from typing import Any, Final, TypeAlias

from hypothesis import strategies as st
from support.drawn import NASTY_TEXTS, json_values, texts

from manycpu.pipeline.spec.job_kinds import JOB_KINDS

Fields: TypeAlias = dict[str, Any]
Values: TypeAlias = st.SearchStrategy[Any]

amounts: Final = st.sampled_from(["8Gi", "500M", "0.5Gi", "1.5Gi", "1", "0", "999999999999999Ti"])
seconds: Final = st.sampled_from([1, 77, 86_400, 10**11])
plain: Final = st.text(st.sampled_from("abc-._019/"), min_size=1, max_size=8)
names: Final = st.sampled_from(["a", "a-b", "a.b", "0", "x" * 63, "x" * 250])
variables: Final = st.sampled_from(["A", "LANG", "HF_TOKEN", "OMP_NUM_THREADS", "_", "a.b", "PYTHONPATH"])

RUN: Final[dict[str, Values]] = {
    "program": st.sampled_from(["question_answering", "hogwild", "./x.py", "-m pkg.mod", "-m", "a b.py"])
    | texts,
    "code": st.none() | st.sampled_from([".", "auto"]) | texts,
    "args": st.lists(texts | st.integers() | st.floats(), max_size=3)
    | st.sampled_from(["", "--a 'b c'", "'"]),
    "data": st.none() | plain | texts,
    "model": st.none() | st.sampled_from(["hf://a/b", "s3://b/m"]) | texts,
    "output": st.none() | plain | texts,
    "nnodes": st.integers(1, 4) | st.sampled_from(["1:4", " 2 : 3 ", "4", 99_999, "1:\u0663"]),
    "nproc_per_node": st.integers(1, 4) | st.just(1024),
    "subprocesses": st.integers(1, 4) | st.just(1024),
    "backend": st.sampled_from([None, "ccl", "gloo", "mpi"]),
    "device": st.sampled_from(["cpu", "xla"]),
    "dtype": st.sampled_from([None, "fp32", "bf16"]),
    "downcast_bf16": st.booleans(),
    "resources": st.fixed_dictionaries(
        {},
        optional={
            "cpu": st.sampled_from([0.5, 1, 4, 0.001, 1e6, 1e300, 1e-9, float("inf"), float("nan")]),
            "memory": amounts,
            "launcher_cpu": st.sampled_from([0.05, 1, 1e-9]),
            "launcher_memory": amounts,
        },
    ),
    "oversubscribe": st.booleans(),
    "spread": st.sampled_from(["require", "prefer"]),
    "env": st.dictionaries(variables | texts, texts | st.integers(), max_size=3),
    "env_from": st.lists(names | texts, max_size=2),
    "job_name": st.none() | st.sampled_from(["a", "weekly-qa", "a--0", "a" * 29]),
    "max_restarts": st.integers(0, 3) | st.just(100),
    "checkpoints": st.none() | texts,
    "resume_from": st.none() | texts,
    "acknowledge_timeout": seconds,
    "queue_timeout": seconds,
    "start_timeout": seconds,
    "run_timeout": seconds,
    "stall_timeout": st.none() | seconds,
    "keep": st.sampled_from(["never", "results", "on_failure", "always"]),
    "keep_for": seconds,
    "tracking": st.lists(st.sampled_from(["tensorboard", "mlflow"]), max_size=2),
    "registered_model": st.none() | texts,
}
"""Field of a run -> values to draw: most are valid, some are not."""

KUBERNETES: Final[dict[str, Values]] = {
    "kind": st.just("kubernetes"),
    "launch": st.sampled_from([*JOB_KINDS]),
    "namespace": st.just("ml") | names,
    "connection": st.none() | texts,
    "service_account": st.none() | names | texts,
    "claim": st.none() | names,
    "claim_size": amounts,
    "claim_access": st.sampled_from(["ReadWriteMany", "ReadWriteOnce"]),
    "storage_class": st.none() | names | texts,
    "mount_path": st.sampled_from(["/data", "/", "/a b", "/a:b", "/a/../b", "/\u00e9", "/tmp", "/dev/shm"]),  # noqa: S108 - in a pod
    "registry": st.none() | st.sampled_from(["r/ml", "http://r:5000/ml"]) | texts,
    "image": st.none() | st.sampled_from(["r/train:1"]) | texts,
    "dockerfile": st.none() | texts,
    "context": st.none() | texts,
    "build_args": st.dictionaries(variables, texts, max_size=2),
    "helper_image": st.none() | texts,
    "builder": st.sampled_from(["pod", "buildkit", "docker", "buildah"]),
    "builder_image": st.none() | texts,
    "build_namespace": st.none() | names,
    "pull_policy": st.sampled_from([None, "IfNotPresent", "Always", "Never"]),
    "pull_secret": st.none() | names,
    "registry_connection": st.none() | texts,
    "registry_ca": st.none() | texts,
    "node_selector": st.dictionaries(names | texts, names | texts, max_size=2),
    "tolerations": st.lists(
        st.dictionaries(
            st.sampled_from(["key", "operator", "effect"]) | texts, texts | json_values, max_size=3
        ),
        max_size=2,
    ),
    "priority_class": st.none() | names | texts,
    "queue": st.none() | names,
    "queue_priority": st.none() | names,
    "direct": st.booleans(),
    "restart_policy": st.sampled_from([None, "Never", "OnFailure"]),
    "mpi": st.sampled_from([None, "intel", "openmpi", "mpich"]),
    "runtime": st.sampled_from(["torch-distributed", "own"]) | names,
}
"""Field of a target on Kubernetes -> values to draw: most are valid, some are not."""

MACHINES: Final[dict[str, Values]] = {
    "kind": st.sampled_from(["local", "baremetal", "kubernetes", "slurm"]) | json_values,
    "launch": st.sampled_from(["processes", "torchrun", "mpirun", "pytorchjob"]) | texts,
    "directory": st.none() | texts,
    "stage": st.sampled_from(["copy", "in_place"]),
    "mpi": st.none() | texts,
    "hostfile": texts,
    "ssh": st.lists(texts, max_size=3) | texts,
    "python": st.none() | texts,
    "interface": st.none() | texts,
}
"""Field of a target on machines -> values to draw: most are valid, some are not."""


def fields(known: dict[str, Values], *needed: str) -> st.SearchStrategy[Fields]:
    """Draw the fields ``needed`` and up to five others of ``known``, each with one of its values."""
    others = st.lists(st.sampled_from([*known]), max_size=5, unique=True)
    return others.flatmap(
        lambda names: st.fixed_dictionaries({name: known[name] for name in (*needed, *names)})
    )


def junk(known: dict[str, Values]) -> st.SearchStrategy[Fields]:
    """Draw fields, one or two of which have any JSON value; their names may be those of no field."""
    odd = st.dictionaries(st.sampled_from([*known, *NASTY_TEXTS]), json_values, min_size=1, max_size=2)
    return st.builds(lambda usual, odd: usual | odd, fields(known), odd)
