"""The specification of a training: what to train."""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from manycpu.pipeline.spec.cpu_plan import CpuRequest
from manycpu.pipeline.spec.credentials import redacted_options
from manycpu.pipeline.spec.tracking import TrackerName
from manycpu.pipeline.spec.words import AMOUNT_PATTERN, parse_memory

Backend = Literal["ccl", "gloo", "mpi"]
LONGEST_S: Final = 10**11  # 3,000 years: what times can be computed with
Seconds = Annotated[int, Field(ge=1, le=LONGEST_S)]
Cores = Annotated[float, Field(ge=0.001, le=10**6)]  # Kubernetes counts thousandths of a core
LABEL_PATTERN: Final = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
"""The beginning of a run's name."""
_STORAGE: Final = "abfss?|az|file|gcs|gs|hf|https?|s3a?"
_OTHER_PROTOCOLS: Final = (  # those of fsspec, except data: which has no slashes
    "adl|arrow_hdfs|async_?wrapper|asynclocal|blockcache|box|cached|dask|dbfs|dir|dropbox|dvc|filecache|ftp|"
    "gdrive|generic|gist|git|github|hdfs|jlab|jupyter|lakefs|libarchive|local|memory|oci|ocilake|oss|"
    "pyscript|reference|root|sftp|simplecache|smb|ssh|tar|tos|tosfs|wandb|webdav|webhdfs|zip"
)
MISTYPED_URL: Final = re.compile(rf"({_STORAGE})(?::(?!//)|//)|({_OTHER_PROTOCOLS}):(?!//)")
"""Matches a URL that lost its colon, or slashes, as in pathlib: it would be the path of a folder."""
_SPARE_S = 3600  # in which a waiting process ends the training itself, and records why
_XLA_DEVICES: Final = 8  # of a node: the cores of a TPU host, and Accelerate's default there


def in_section(name: str) -> Callable[..., Any]:
    """Make a ``Field`` for a section of the trigger form."""
    return partial(Field, json_schema_extra={"section": name})


def words(value: object) -> object:
    """Split a text into words as a shell does; a value that is no text is returned unchanged."""
    return shlex.split(value) if isinstance(value, str) else value


def _null(value: object) -> object:
    """Return None for the text ``null``, and any other value unchanged."""
    return None if value == "null" else value  # the trigger form and the command line have only text


def passable(value: Any) -> Any:
    """Return a value unchanged if it can be passed to a process, and kept in a ledger.

    Raises:
        ValueError: It has a NUL character, or is no UTF-8.
    """
    parts = [value]
    for part in parts:  # the list grows: its items are added
        if isinstance(part, Mapping):
            parts += [*part, *part.values()]
        elif isinstance(part, (tuple, list)):
            parts += part
        elif isinstance(part, str):
            if "\0" in part:
                raise ValueError("a NUL character can stand in no path, no argument and no environment")
            # Python reads bytes that are not UTF-8 as characters of this range.
            if not part.isascii() and any("\ud800" <= character <= "\udfff" for character in part):
                raise ValueError("it is no UTF-8, which ledgers and reports need")
    return value


_program, _scale, _environment, _failures, _deadlines, _tracking = map(
    in_section, ("Program", "Scale", "Environment", "Failures", "Deadlines", "Tracking")
)


class Resources(BaseModel):
    """What each node gives to the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: Cores | None = Field(
        None, description="Cores of each node; default: all that the node grants.", examples=[4]
    )
    memory: str | None = Field(
        None,
        pattern=AMOUNT_PATTERN,
        description="Memory of each node, as a Kubernetes quantity.",
        examples=["8Gi"],
    )
    launcher_cpu: Cores | None = Field(
        None,
        description="Cores that the pod of mpirun asks for; it may use ten times as many. Default: 0.05, "
        "where `cpu` is given.",
        examples=[0.05],
    )
    launcher_memory: str | None = Field(
        None,
        pattern=AMOUNT_PATTERN,
        description="Memory of the pod of mpirun. Default: 256Mi, and 16Mi for each node, where `memory` is "
        "given.",
        examples=["512Mi"],
    )


class NodeRange(NamedTuple):
    """The least and the greatest number of nodes; equal unless the run is elastic."""

    least: int
    most: int


class TrainingRun(BaseModel):
    """One training: its program, its data and its scale. Immutable; the same for every target."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)
    _no_nul = field_validator("*")(passable)

    program: str = _program(
        min_length=1,
        description="What to run: a recipe's name, a script's path, or `-m module`.",
        examples=["question_answering", "./train.py", "-m mypackage.train"],
    )
    code: str | None = _program(
        None,
        description="Folder that is the code: a copy of it is the program's working folder, and Python finds "
        "modules there. A path, or `auto`: the nearest folder around it with .git or pyproject.toml. "
        "Default: the script's own folder; of a module the folder where relative paths start.",
        examples=[".", "auto"],
    )
    args: Annotated[tuple[str, ...], BeforeValidator(words)] = _program(
        (),
        description="The program's arguments. {data}, {model}, {output} and {checkpoints} are replaced by "
        "where the run finds them on its node. One whose field is not given is refused, and so is a word "
        "in braces that is like one, such as {dta}. All else stays as it is: {lr}, {date}, JSON.",
        examples=[["--data", "{data}", "--out", "{output}"]],
    )
    data: str | None = _program(
        None,
        description="Data set to stage: a path, an fsspec URL, or a Hub data set.",
        examples=["./squad-small", "s3://bucket/squad", "hf://datasets/rajpurkar/squad"],
    )
    model: str | None = _program(
        None,
        description="Base checkpoint to stage, in the same ways as the data.",
        examples=["./minilm", "hf://google-bert/bert-base-uncased"],
    )
    output: Annotated[str | None, BeforeValidator(_null)] = _program(
        min_length=1,
        description="Where the trained model and report.json go: the path or fsspec URL of an empty or new "
        "folder. Write null if the program writes no model: then only the report is kept, in the folder "
        "`reports` of this machine's $MANYCPU_HOME or of the target's directory.",
        examples=["./models/qa", "s3://models/qa/2026-01-01"],
    )
    nnodes: int | str = _scale(
        1,
        description="Nodes, as torchrun counts them: `4` is exact, `1:4` is a range for elastic launches.",
        examples=[1, 4, "1:4"],
    )
    nproc_per_node: int = _scale(
        1,
        ge=1,
        le=1024,
        description="Training processes on each node; left out, one for each socket of the target local. On "
        f"device xla its devices, which one process drives; left out, {_XLA_DEVICES}.",
        examples=[1, 2],
    )
    subprocesses: int = _scale(
        1,
        ge=1,
        le=1024,
        description="Processes that compute for each training process at a time: 1 is itself alone. A "
        "program that starts workers of its own (torch.multiprocessing, Hogwild, loaders that compute as "
        "much) gives their number: each gets floor(cores / (processes x subprocesses)) threads, and they "
        "share the cores of the process that started them.",
        examples=[4],
    )
    backend: Backend | None = _scale(
        None,
        description="Collective backend; the one asked for is the one used, or the run fails. Default: ccl "
        "where every rank has it, else gloo; the run's first lines and its report say which, and why.",
    )
    device: Literal["cpu", "xla"] = _scale(
        "cpu", description="Where tensors are computed: `cpu`, or `xla`, TPUs by torch_xla (docs/xla.md)."
    )
    dtype: Literal["fp32", "bf16"] | None = _scale(
        None,
        description="Number format of the training; recipes follow it, other programs find MANYCPU_DTYPE. "
        "Default: fp32; bf16 for the recipes that fine-tune, on processors with instructions for it.",
    )
    downcast_bf16: bool = _scale(
        default=False,
        description="On device xla with dtype bf16: the model's float becomes bfloat16 and its double "
        "float, as Accelerate means it; its outputs, and metrics of them, stay float.",
    )
    resources: Resources = _scale(default_factory=Resources, description="What each node gives to the run.")
    oversubscribe: bool = _scale(
        default=False,
        description="Allow more processes on a node than it has cores: slow, and sometimes wanted in tests.",
    )
    spread: Literal["require", "prefer"] = _scale(
        "prefer", description="Whether the nodes must be distinct machines."
    )
    env: dict[str, str] = _environment(
        default_factory=dict,
        description="Environment of every rank; wins over what manycpu sets, with a warning. The value of a "
        "variable that is called like a secret, such as HF_TOKEN, is shown nowhere; on Kubernetes it is in a "
        "Secret.",
        examples=[{"TOKENIZERS_PARALLELISM": "false"}],
    )
    env_from: tuple[str, ...] = _environment(
        (),
        description="Names of secrets whose keys become environment variables, such as HF_TOKEN.",
        examples=[["hub-token"]],
    )
    job_name: str | None = _environment(
        None,
        pattern=LABEL_PATTERN,
        max_length=29,
        description="Readable beginning of every name the run makes; default: from the program.",
        examples=["weekly-qa"],
    )
    max_restarts: int = _failures(
        0, ge=0, le=100, description="How often the launcher restarts failed ranks within one attempt."
    )
    checkpoints: str | None = _failures(
        None,
        description="Folder on the nodes for checkpoints that outlive the run. The run has a folder of its "
        "name there, and a new one when it trains again after a success. Other trainings resume from these "
        "checkpoints only by `resume_from`. Default: in the run's own folder.",
        examples=["./checkpoints/qa"],
    )
    resume_from: str | None = _failures(
        None,
        description="Checkpoint folder to start from, of any run; a retry resumes from the run's last one by "
        "itself.",
        examples=["./checkpoints/qa/train-0123456789/checkpoint-500"],
    )
    acknowledge_timeout: Seconds = _deadlines(
        60, description="Seconds until the target must have taken notice of the run."
    )
    queue_timeout: Seconds = _deadlines(86_400, description="Seconds to wait for capacity.")
    start_timeout: Seconds = _deadlines(
        900, description="Seconds from capacity until every rank has met the others."
    )
    run_timeout: Seconds = _deadlines(604_800, description="Seconds that the training may take.")
    stall_timeout: Seconds | None = _deadlines(
        None,
        description="Seconds without a line from any rank after which the training is ended; default: never.",
    )
    keep: Literal["never", "results", "on_failure", "always"] = _failures(
        "results",
        description="What of a run to keep for `keep_for`. `results`: of a run that failed or was cancelled, "
        "its output and checkpoints alone, so that the same run continues; `on_failure`: all of such a run; "
        "`always`: all of every run; `never`: nothing. These always stay: a trained model that was not "
        "exported, and what a training wrote if it is unknown how it ended (docs/kept.md).",
    )
    keep_for: Seconds = _failures(
        259_200,
        description="Seconds to keep what is kept, from the clean-up on; the next run in the namespace or "
        "folder removes it then.",
    )
    tracking: tuple[TrackerName, ...] = _tracking(
        (),
        description="Trackers of parameters and metrics: `tensorboard` (files), `mlflow` (the server in "
        "MLFLOW_TRACKING_URI). An unreachable tracker stops no training (docs/tracking.md).",
        examples=[["tensorboard", "mlflow"]],
    )
    registered_model: str | None = _tracking(
        None,
        min_length=1,
        description="Name under which MLflow registers the exported model; needs mlflow in `tracking`.",
        examples=["weekly-qa"],
    )

    @model_validator(mode="before")
    @classmethod
    def _devices_of_xla(cls, fields: Any) -> Any:
        """On device xla, let ``nproc_per_node`` default to the devices of a TPU host."""
        if isinstance(fields, Mapping) and fields.get("device") == "xla":
            return {"nproc_per_node": _XLA_DEVICES, **fields}
        return fields

    @field_validator("code", "data", "model", "output", "checkpoints", "resume_from")
    @classmethod
    def _paths_are_paths_or_urls(cls, value: str | None) -> str | None:
        """Return a path or URL unchanged; raises ValueError if it is blank, or a mistyped URL."""
        if value is not None and not value.strip():
            raise ValueError("it is empty, as of a template that gave nothing: give a path or a URL")
        # Only a URL is chained: in a path, "::" is a part of a name.
        parts = value.split("::") if value is not None and "://" in value else [value or ""]
        for match in filter(None, map(MISTYPED_URL.match, parts)):
            protocol = match[1] or match[2]
            raise ValueError(f"a URL begins with {protocol}://, and a folder of this name with ./{match[0]}")
        return value

    @field_validator("nnodes")
    @classmethod
    def _nodes_are_a_count_or_a_range(cls, value: int | str) -> int | str:
        """Return a count of nodes as an int, or a range as the text ``least:most`` without blanks."""
        match = re.fullmatch(r"\s*([1-9]\d{0,4})\s*(?::\s*([1-9]\d{0,4})\s*)?", str(value))
        if match is None:
            raise ValueError("a number of nodes is needed, such as 4, or a range, such as '1:4'")
        if match[2] is None:
            return int(match[1])
        if int(match[1]) > int(match[2]):
            raise ValueError("the range's first number is the least: write it as '1:4'")
        return f"{match[1]}:{match[2]}"

    @field_validator("env")
    @classmethod
    def _variables_have_names(cls, value: dict[str, str]) -> dict[str, str]:
        """Return the variables unchanged; raises ValueError if a name is empty, or has an equals sign."""
        wrong = [name for name in value if not name or "=" in name]
        if wrong:
            # Redacted, because a wrong name may be NAME=secret.
            raise ValueError(f"{redacted_options(wrong)[0]!r} is no name of a variable")
        return value

    @field_validator("registered_model")
    @classmethod
    def _model_can_be_registered(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Return the name unchanged; raises ValueError if MLflow cannot register a model under it."""
        # A field that is missing in info.data was wrong, which is an error already.
        if value is None or not {"tracking", "output"} <= info.data.keys():
            return value
        if "mlflow" not in info.data["tracking"]:
            raise ValueError("MLflow registers models: put mlflow into run.tracking")
        if info.data["output"] is None:
            raise ValueError("there is no model to register where run.output is null")
        if set(value) & {"/", ":", "'"}:
            raise ValueError("the name of a registered model has no slash, no colon and no quote")
        return value

    @property
    def nodes(self) -> NodeRange:
        """How many nodes the run may have."""
        low, _, high = str(self.nnodes).partition(":")
        return NodeRange(int(low), int(high or low))

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change during the run."""
        return isinstance(self.nnodes, str)

    @property
    def processes(self) -> int:
        """Training processes on each node: on device xla one, which drives all of its devices."""
        return 1 if self.device == "xla" else self.nproc_per_node

    @property
    def longest(self) -> int:
        """Seconds after which an attempt has certainly ended: its time budgets, and an hour to spare."""
        return self.queue_timeout + self.start_timeout + self.run_timeout + _SPARE_S

    @property
    def cpu_request(self) -> CpuRequest:
        """What the run asks of each node's CPUs."""
        memory = self.resources.memory
        return CpuRequest(
            # None if the user left it out: then the CPU plan chooses.
            processes=self.processes if "nproc_per_node" in self.model_fields_set else None,
            subprocesses=self.subprocesses,
            cpus=self.resources.cpu,
            memory=parse_memory(memory) if memory else None,
            dtype=self.dtype or "fp32",
            backend=self.backend,
            env=self.env,
        )

    @property
    def label(self) -> str:
        """Readable beginning of the run's names: ``job_name``, or the last part of the program's name."""
        if self.job_name:
            return self.job_name
        name = self.program.removeprefix("-m").strip().rsplit("/", 1)[-1]
        return name.removesuffix(".py").rsplit(".", 1)[-1]


BUDGETS: Final = [name for name in TrainingRun.model_fields if name.endswith(("_timeout", "keep_for"))]
"""The fields that are ``Seconds``."""
