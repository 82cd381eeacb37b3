"""The errors that this package raises; each says what to do next."""

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Self

from manycpu.pipeline.spec.credentials import redacted

DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The numbers of an OSError that says that a disk, or a user's share of it, is full."""


def recordable(text: str) -> str:
    r"""Hide the credentials in a text, and escape what no ledger can hold: bytes that are not UTF-8.

    >>> print(recordable("caf\udce9.txt"))
    caf\udce9.txt
    """
    return redacted(text).encode(errors="backslashreplace").decode()


class ManycpuError(Exception):
    """The base of all errors: what was asked, what was observed, what to do next; credentials are hidden.

    Args:
        message: What was asked and what was seen.
        field: The field it came from, dotted as in a run file, such as ``run.nproc_per_node``.
        fix: What to do next, as a sentence.
    """

    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        message, field, fix = recordable(message), field and recordable(field), fix and recordable(fix)
        super().__init__(message, field, fix)
        self.message, self.field, self.fix = message, field, fix

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        # The last of several lines may be a caret below a word: then the fix needs a line of its own.
        between = "\n" if "\n" in self.message else " "
        parts = (part for part in (self.message, self.fix) if part)
        # Each part ends as a sentence, except one of several lines.
        return where + between.join(
            part if part.endswith((".", ".)", "!", "?", ":", "\n")) or "\n" in part else f"{part}."
            for part in parts
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes in Airflow; keyword arguments do not survive the default pickling.
        return (_rebuild, (type(self), self.message, self.field, self.fix), self.__dict__)


class BadInputError(ManycpuError):
    """A field of the run or the target cannot be used: nothing was started. ``manycpu`` exits 2."""

    exit_code = 2


class ForeignRunError(BadInputError):
    """The run belongs to another task, with another description: nothing of it was changed."""


class HttpError(ManycpuError):
    """A server refuses a call, or does not answer; ``status`` is the HTTP status, 0: there was no answer."""

    statuses: ClassVar[frozenset[int]] = frozenset()
    """The HTTP statuses that a class stands for."""

    def __init__(
        self, message: str, *, field: str | None = None, fix: str | None = None, status: int = 0
    ) -> None:
        super().__init__(message, field=field, fix=fix)
        self.status = status

    @classmethod
    def of_status(
        cls, status: int, message: str, *, field: str | None = None, fix: str | None = None
    ) -> Self:
        """Make an error for an HTTP status.

        Its class is the direct subclass whose ``statuses`` contain the status, or else this class.
        """
        kind = next((kind for kind in cls.__subclasses__() if status in kind.statuses), cls)
        return kind(message, field=field, fix=fix, status=status)


class ClusterError(HttpError):
    """The target's service refuses a call or does not answer; the caller may retry."""


class UnauthorizedError(ClusterError):
    """The cluster does not accept the credentials."""

    statuses = frozenset({401})


class ForbiddenError(ClusterError):
    """The account lacks a right, or an admission rule forbids it."""

    statuses = frozenset({403})


class NotFoundError(ClusterError):
    """There is no such object, or no such kind."""

    statuses = frozenset({404})


class ConflictError(ClusterError):
    """There is an object of that name already, or it has changed meanwhile."""

    statuses = frozenset({409})


class InvalidError(ClusterError):
    """The call itself is wrong or too large: the cluster would refuse it again."""

    statuses = frozenset({400, 405, 413, 422})


class StageError(ManycpuError):
    """The data or the base model did not reach the volume whole."""


class BuildError(ManycpuError):
    """The code could not be snapshotted, or the image not built."""


class RegistryError(HttpError, BuildError):
    """A registry refuses a call, or does not answer."""


class RegistryUnauthorizedError(RegistryError):
    """The registry asks for a login, or for another one."""

    statuses = frozenset({401})


class TransientError(RegistryError):
    """The registry is away or overloaded: the next call may succeed."""

    statuses = frozenset({408, 425, 429, 500, 502, 503, 504})


class LaunchError(ManycpuError):
    """The target did not accept the run: no MPI, no host, no such handle."""


class UnseenError(LaunchError):
    """Whether the training still runs cannot be seen from here: nothing of its run was changed."""


class TrainingFailedError(ManycpuError):
    """The training ended badly; the message has the first rank that failed and its last lines."""


class NoReportError(TrainingFailedError):
    """The run has no report."""


class CancelledError(ManycpuError):
    """A person ended the training."""


class DeadlineError(ManycpuError):
    """One of the run's time budgets was used up."""


class ExportError(ManycpuError):
    """The model did not reach the output whole."""


class OutputTakenError(ExportError):
    """Another run has the output, or has left its model there: this run writes nothing to it."""


class LedgerError(ManycpuError):
    """The record of what a run owns cannot be read: another version of manycpu wrote it, perhaps."""


class RunGoneError(LedgerError, FileNotFoundError):
    """The run has not begun, or was deleted while it was in use: its ledger or its claim is gone."""


class LeftBehindError(ManycpuError):
    """Something that the run made could not be deleted."""


@dataclass(frozen=True)
class Finding:
    """One thing that preflight found: what is wrong with which field, and what to do next."""

    field: str
    message: str
    fix: str
    fatal: bool = True

    @classmethod
    def of(cls, error: ManycpuError, field: str) -> Self:
        """Turn an error into a finding; ``field`` is used if the error names no field."""
        return cls(error.field or field, error.message, error.fix or "")

    def __str__(self) -> str:
        return str(BadInputError(self.message, field=self.field, fix=self.fix))


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise the fatal findings as one error; do nothing if none is fatal.

    Raises:
        BadInputError: One line for each fatal finding.
    """
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        raise as_error(fatal)


def as_error(findings: Sequence[Finding]) -> BadInputError:
    """Turn one or more findings into one error, which has a line for each of them."""
    if len(findings) == 1:
        return BadInputError(findings[0].message, field=findings[0].field, fix=findings[0].fix)
    lines = "\n".join(["several things need a change:", *(f"- {finding}" for finding in findings)])
    return BadInputError(lines)


def _rebuild(kind: type[ManycpuError], message: str, field: str | None, fix: str | None) -> ManycpuError:
    """Make an error from its parts when it is unpickled."""
    return kind(message, field=field, fix=fix)


_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "helper": ("huggingface_hub",),
    "kubernetes": ("cryptography", "kubernetes", "kubernetes_asyncio", "requests", "tenacity", "websocket"),
    "train": ("cloudpickle",),
}
"""Extra -> its modules that a command imports; ranks say themselves what they lack."""


def require(extra: str, field: str, what: str) -> None:
    """Raise unless the modules of one of manycpu's pip extras are installed; imports none of them.

    Args:
        extra: The extra, such as ``kubernetes``.
        field: The field of the run or the target that needs it, for the error.
        what: What needs it, for the error.

    Raises:
        BadInputError: A module is missing; the error has the command that installs the extra.
    """
    missing = [module for module in _MODULES[extra] if find_spec(module) is None]
    if missing:
        message = f"{what} needs {', '.join(missing)}, which this environment lacks"
        raise BadInputError(message, field=field, fix=install(extra))


def install(extras: str) -> str:
    """Write the line that installs extras.

    >>> install("train,vision")
    "Install it: pip install 'manycpu[train,vision]'"
    """
    return f"Install it: pip install 'manycpu[{extras}]'"
