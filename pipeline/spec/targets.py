"""Where to train: a closed union with the discriminator ``kind``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticKnownError

from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.credentials import redacted_description
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, TRAINJOB
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.training_run import TrainingRun, in_section, passable, words
from manycpu.pipeline.spec.words import AMOUNT_PATTERN

FOLDER_PATTERN: Final = r"^/.*[^/]$"
NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
"""Name of an object of Kubernetes."""
_target, _volume, _image, _nodes = map(in_section, ("Target", "Volume", "Image", "Nodes"))
_DIRECTORY = "Folder for runs, staged data and code snapshots; default: $MANYCPU_HOME, or ~/.manycpu."
_STAGE = (
    "How data and base model that are paths come to the ranks: as a `copy`, which shares its blocks where "
    "the file system clones files, or `in_place`: the ranks read the paths themselves{hosts}. Either is "
    "hashed when the run begins. In place, the program and others can change them during the run; the digest "
    "in the report is of the beginning."
)
_MPI = "The mpirun to use: Intel MPI, Open MPI or MPICH; default: impi-rt beside Python, then PATH."

Family = Literal["intel", "openmpi", "mpich"]
"""An implementation of MPI."""
DEFAULT_MPI: Final[Family] = "intel"
"""The MPI of an mpijob that names none."""
DEFAULT_RUNTIME: Final = "torch-distributed"
"""Runtime of a TrainJob that names none: it comes with Trainer."""
OWN_RUNTIME: Final = "own"
"""Runtime of a TrainJob that is made for its run."""


def _job_kind(launch: str) -> str:
    """Return ``launch`` if it is a launch kind of Kubernetes; otherwise raise pydantic's error."""
    if launch not in JOB_KINDS:
        raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, JOB_KINDS))})
    return launch


class TargetFields(BaseModel):
    """The fields of a target, and what follows from its kind. The defaults suit machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _no_nul = field_validator("*")(passable)

    kind: str
    launch: str
    is_this_machine: ClassVar[bool] = False
    """Whether the ranks run on this machine, in this environment."""
    has_image: ClassVar[bool] = False
    """Whether the ranks run in an image, with modules that this environment may lack."""
    extra: ClassVar[tuple[str, str, str] | None] = None
    """The extra of manycpu that is needed, the field that asks for it, and what it is for."""
    has_host_per_node: ClassVar[bool] = False
    """Whether each node is a host of its own, so that ranks of two nodes never share one."""
    paths: ClassVar[tuple[str, ...]] = ("directory",)
    """Fields that are paths: relative ones start from the folder of the run file or the DAG file."""
    reached_by: ClassVar[tuple[str, ...]] = ("directory",)
    """Fields that say how to reach a run; a change of them does not change what a run does."""

    @property
    def waits_in_queue(self) -> bool:
        """Whether a queue admits the run, and may preempt it any number of times."""
        return False

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher pod apart from the workers starts the ranks, and fails if one of them fails."""
        return False

    @property
    def vouches_for_ranks(self) -> bool:
        """Whether a success proves that all ranks succeeded: what starts them fails if one of them does."""
        return True

    def completed(self, run: TrainingRun) -> tuple[TrainingRun, "TargetFields"]:
        """Return run and target, with fields that the user left out filled in, if their values are known."""
        return run, self

    def node_folder(self, base: Path) -> Path:
        """Return the folder on the nodes that relative paths start from; here they start from ``base``."""
        return base

    def recorded(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields of a run or a target as they are written to the run's ledger."""
        return fields


class Local(TargetFields):
    """This machine."""

    is_this_machine = True
    kind: Literal["local"] = "local"
    launch: Literal["processes", "torchrun", "mpirun"] = _target(
        "processes",
        description="What starts the ranks: `processes` is manycpu itself; left out, `torchrun` where "
        "run.max_restarts asks for restarts.",
    )
    directory: str | None = _target(None, description=_DIRECTORY)
    stage: Literal["copy", "in_place"] = _target("copy", description=_STAGE.format(hosts=""))
    mpi: str | None = _target(None, description=_MPI, examples=["mpirun.openmpi"])

    def completed(self, run: TrainingRun) -> tuple[TrainingRun, "Local"]:
        """Fill in what the user left out: torchrun if ranks may be restarted, and the number of processes."""
        target = self
        if run.max_restarts and "launch" not in self.model_fields_set:
            target = self.model_copy(update={"launch": "torchrun"})
        if "nproc_per_node" not in run.model_fields_set:
            plan = cpu_plan.plan(Machine.observe(), run.cpu_request)
            run = run.model_copy(update={"nproc_per_node": plan.processes})
        return run, target


class BareMetal(TargetFields):
    """Hosts of a hostfile, reached by ssh without a password; this machine may be one of them."""

    paths = ("directory", "hostfile")
    kind: Literal["baremetal"] = "baremetal"
    launch: Literal["mpirun"] = _target("mpirun", description="What starts the ranks.")
    hostfile: str = _target(
        min_length=1,
        description="File with a host on each line: `name`, `name:processes` or `name slots=processes`.",
        examples=["./hosts"],
    )
    ssh: Annotated[tuple[str, ...], BeforeValidator(words)] = _target(
        ("ssh",),
        min_length=1,
        description="The ssh command with its options.",
        examples=["ssh -p 2222 -i ~/.ssh/training"],
    )
    directory: str | None = _target(
        None, description=_DIRECTORY + " The same path on every host, shared or not."
    )
    stage: Literal["copy", "in_place"] = _target(
        "copy", description=_STAGE.format(hosts=", which every host must have, such as in a shared folder")
    )
    python: str | None = _target(
        None,
        description="Python with manycpu and torch on every host; default: the path of this one.",
        examples=["/opt/train/bin/python"],
    )
    mpi: str | None = _target(None, description=_MPI, examples=["mpirun.openmpi"])
    interface: str | None = _target(
        None,
        description="Network interface between the hosts; default: the one that reaches the first host.",
        examples=["eth0"],
    )


class Kubernetes(TargetFields):
    """A Kubernetes cluster with an operator for the launch kind."""

    has_image = True
    paths = ("dockerfile", "context", "registry_ca")
    reached_by = ("connection",)
    extra = ("kubernetes", "target.kind", "Kubernetes")
    has_host_per_node = True
    kind: Literal["kubernetes"] = "kubernetes"
    launch: Annotated[str, AfterValidator(_job_kind)] = Field(
        next(iter(JOB_KINDS)),
        description="The resource that starts the ranks.",
        json_schema_extra={"enum": [*JOB_KINDS], "section": "Target"},
    )
    namespace: str = _target(
        "default",
        pattern=NAME_PATTERN,
        max_length=63,
        description="Namespace of everything that the run creates.",
        examples=["ml"],
    )
    connection: str | None = _target(
        None,
        description="In Airflow the id of a connection of type `kubernetes`, elsewhere a kubeconfig's path; "
        "default: the pod's own account, or $KUBECONFIG, or ~/.kube/config.",
        examples=["kubernetes_default", "~/.kube/config"],
    )
    service_account: str | None = _target(
        None, description="ServiceAccount of the training pods; they get no API token."
    )
    claim: str | None = _volume(
        None,
        pattern=NAME_PATTERN,
        description="PersistentVolumeClaim for data, checkpoints and models; default: one made for the run, "
        "and deleted with it.",
        examples=["training-data"],
    )
    claim_size: str = _volume(
        "20Gi", pattern=AMOUNT_PATTERN, description="Size of a claim that is made for the run."
    )
    claim_access: Literal["ReadWriteMany", "ReadWriteOnce"] = _volume(
        "ReadWriteMany",
        description="Access mode of a claim that is made for the run; several nodes need ReadWriteMany.",
    )
    storage_class: str | None = _volume(
        None, description="StorageClass of a claim that is made for the run; default: the cluster's default."
    )
    mount_path: str = _volume(
        "/tmp/pvc-mount",  # noqa: S108 - inside a pod, with one user
        pattern=FOLDER_PATTERN,
        description="Where the claim is mounted in every pod.",
    )
    registry: str | None = _image(
        None,
        description="Registry and repository prefix that images are pushed to and pulled from.",
        examples=["registry.example/ml"],
    )
    image: str | None = _image(
        None,
        description="Image with Python 3.11 or later, torch and manycpu's dependencies; default: built from "
        "the Dockerfile.",
        examples=["registry.example/ml/train:1"],
    )
    dockerfile: str | None = _image(
        None, description="Dockerfile of the image; default: manycpu's own.", examples=["./Dockerfile"]
    )
    context: str | None = _image(
        None, description="Folder that the Dockerfile may copy from; default: the Dockerfile's."
    )
    build_args: dict[str, str] = _image(
        default_factory=dict,
        description="Arguments of the Dockerfile, such as BASE_IMAGE, TORCH_INDEX, TRANSFORMERS, "
        "REQUIREMENTS, PACKAGES. No secrets.",
        examples=[{"REQUIREMENTS": "timm==1.0.9"}],
    )
    helper_image: str | None = _image(
        None,
        description="Image of the pods that stage and export: manycpu's dependencies without torch; default: "
        "built from the Dockerfile.",
    )
    builder: Literal["pod", "buildkit", "docker", "buildah"] = _image(
        "pod",
        description="What builds images: buildah in an unprivileged pod (`pod`), rootless BuildKit in one "
        "(`buildkit`), or docker or buildah on the worker.",
    )
    builder_image: str | None = _image(
        None, description="Image of the builder pod: with buildah, or with rootless BuildKit."
    )
    build_namespace: str | None = _image(
        None,
        pattern=NAME_PATTERN,
        description="Namespace of builder pods, which need Pod Security level baseline (`pod`) or privileged "
        "(`buildkit`); default: the run's.",
    )
    pull_policy: Literal["IfNotPresent", "Always", "Never"] | None = _image(
        None, description="imagePullPolicy of every pod; default: Kubernetes's own."
    )
    pull_secret: str | None = _image(
        None,
        pattern=NAME_PATTERN,
        description="Secret of type kubernetes.io/dockerconfigjson for the registry.",
    )
    registry_connection: str | None = _image(
        None,
        description="In Airflow the id of a connection of type `docker` with the registry's login, elsewhere "
        "a docker config.json; default: ~/.docker/config.json, then the pull secret.",
    )
    registry_ca: str | None = _image(None, description="File with the certificate authority of the registry.")
    node_selector: dict[str, str] = _nodes(
        default_factory=dict,
        description="Labels of the nodes to run on.",
        examples=[{"node.kubernetes.io/instance-type": "m7i.metal-24xl"}],
    )
    # With a schema that refers to nothing: Airflow's form takes it alone.
    tolerations: tuple[dict[str, Annotated[JsonValue, WithJsonSchema({})]], ...] = _nodes(
        (),
        description="Tolerations of the training pods.",
        examples=[[{"key": "training", "operator": "Exists"}]],
    )
    priority_class: str | None = _nodes(None, description="PriorityClass of the training pods.")
    queue: str | None = _nodes(
        None, pattern=NAME_PATTERN, description="Kueue's LocalQueue that admits the job."
    )
    queue_priority: str | None = _nodes(
        None,
        pattern=NAME_PATTERN,
        description="Kueue's WorkloadPriorityClass of the job in its queue; default: that of priority_class.",
    )
    direct: bool = _volume(
        True,
        description="Whether data goes straight to helper pods, over TLS, where this machine reaches them; "
        "else through the API server.",
    )
    restart_policy: Literal["Never", "OnFailure"] | None = _nodes(
        None, description="restartPolicy of the pods; default: OnFailure with run.max_restarts, else Never."
    )
    mpi: Family | None = _target(
        None,
        description="The MPI in the image: of an mpijob (default: intel), or of a trainjob, whose ranks "
        "torchrun starts if this field is left out.",
    )
    runtime: str = _target(
        DEFAULT_RUNTIME,
        pattern=NAME_PATTERN,
        description="The runtime of a trainjob: a ClusterTrainingRuntime by name, or `own` for one that is "
        "made for the run and deleted with it.",
        examples=["own"],
    )

    @property
    def has_launcher(self) -> bool:
        """Whether the job has a launcher pod apart from the workers.

        It starts the ranks, and fails if one of them fails.
        """
        kind = JOB_KINDS[self.launch]
        # A trainjob with an MPI has one too: mpirun starts its ranks, and not torchrun.
        return kind.launcher or (kind is TRAINJOB and self.mpi is not None)

    @property
    def waits_in_queue(self) -> bool:
        """Whether Kueue admits the job."""
        return bool(self.queue)

    @property
    def vouches_for_ranks(self) -> bool:
        """Whether a success proves that every rank succeeded; without a launcher, pods end independently."""
        return self.has_launcher

    def node_folder(self, base: Path) -> Path:  # noqa: ARG002 - the volume is the same from everywhere
        """Return the volume's folder in the pods."""
        return Path(self.mount_path)

    def recorded(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields without secrets: a ledger is a ConfigMap, which other users may be able to read."""
        return redacted_description(fields)

    @property
    def builds_in(self) -> str:
        """The namespace of builder pods."""
        return self.build_namespace or self.namespace

    @property
    def makes_claim(self) -> bool:
        """Whether the claim is made for the run, and deleted with it."""
        return self.claim is None

    @property
    def home(self) -> str:
        """Manycpu's folder on the volume, as the pods see it."""
        return f"{self.mount_path}/manycpu"


Target = Annotated[Local | BareMetal | Kubernetes, Field(discriminator="kind")]
KINDS: Final[Mapping[str, type[TargetFields]]] = {
    "local": Local,
    "baremetal": BareMetal,
    "kubernetes": Kubernetes,
}
"""Name of a kind of target -> its fields."""
