"""Where to train: a closed union, told apart by ``kind``."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from manycpu.pipeline.spec.training_run import _section, _words

__all__ = ["BareMetal", "Local", "Target"]

_DIRECTORY = "Folder for runs, staged data and code snapshots; default: $MANYCPU_HOME, or ~/.manycpu."
_MPI = "The mpirun to use: Intel MPI, Open MPI or MPICH; default: impi-rt beside Python, then PATH."


class Local(BaseModel):
    """This machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local"] = "local"
    launch: Literal["torchrun", "mpirun"] = Field(
        "torchrun", description="What starts the ranks.", json_schema_extra=_section("Target")
    )
    directory: str | None = Field(None, description=_DIRECTORY, json_schema_extra=_section("Target"))
    mpi: str | None = Field(
        None, description=_MPI, examples=["mpirun.openmpi"], json_schema_extra=_section("Target")
    )


class BareMetal(BaseModel):
    """Hosts of a hostfile, reached by ssh without a password; this machine may be one of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["baremetal"] = "baremetal"
    launch: Literal["mpirun"] = Field(
        "mpirun", description="What starts the ranks.", json_schema_extra=_section("Target")
    )
    hostfile: str = Field(
        min_length=1,
        description="File with a host on each line: `name`, `name:processes` or `name slots=processes`.",
        examples=["./hosts"],
        json_schema_extra=_section("Target"),
    )
    ssh: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        ("ssh",),
        min_length=1,
        description="The ssh command with its options.",
        examples=["ssh -p 2222 -i ~/.ssh/training"],
        json_schema_extra=_section("Target"),
    )
    directory: str | None = Field(
        None,
        description=_DIRECTORY + " The same path on every host, shared or not.",
        json_schema_extra=_section("Target"),
    )
    python: str | None = Field(
        None,
        description="Python with manycpu and torch on every host; default: the path of this one.",
        examples=["/opt/train/bin/python"],
        json_schema_extra=_section("Target"),
    )
    mpi: str | None = Field(
        None, description=_MPI, examples=["mpirun.openmpi"], json_schema_extra=_section("Target")
    )
    interface: str | None = Field(
        None,
        description="Network interface between the hosts; default: the one that reaches the first host.",
        examples=["eth0"],
        json_schema_extra=_section("Target"),
    )


Target = Annotated[Local | BareMetal, Field(discriminator="kind")]
