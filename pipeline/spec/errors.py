"""Every error this package raises, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from manycpu.pipeline.spec.credentials import redacted

__all__ = [
    "BadInputError",
    "BuildError",
    "CancelledError",
    "ClusterError",
    "DeadlineError",
    "ExportError",
    "Finding",
    "ForeignRunError",
    "LaunchError",
    "LedgerError",
    "LeftBehindError",
    "ManycpuError",
    "RegistryError",
    "RunGoneError",
    "StageError",
    "TrainingFailedError",
    "as_error",
]


class ManycpuError(Exception):
    """The base of all: says what was asked, what was seen, and what to do next; of URLs without credentials.

    Args:
        message: What was asked and what was seen.
        field: The field it came from, dotted as in a run file, such as ``run.nproc_per_node``.
        fix: What to do next, as a sentence.
    """

    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        message, field, fix = redacted(message), field and redacted(field), fix and redacted(fix)
        super().__init__(message, field, fix)
        self.message, self.field, self.fix = message, field, fix

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return where + " ".join(_sentence(part) for part in (self.message, self.fix) if part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes in Airflow; keyword arguments do not survive the default pickling.
        return (_rebuild, (type(self), self.message, self.field, self.fix), self.__dict__)


class BadInputError(ManycpuError):
    """A field of the run or the target cannot be used: nothing was started. ``manycpu`` exits 2."""

    exit_code = 2


class ForeignRunError(BadInputError):
    """The run is another task's, which describes another training: nothing of it was touched."""


class ClusterError(ManycpuError):
    """The Kubernetes cluster refuses a call, or does not answer."""

    status = 0
    """The HTTP status; 0 where there was no answer."""


class StageError(ManycpuError):
    """The data or the base model did not reach the volume whole."""


class BuildError(ManycpuError):
    """The code could not be snapshotted, or the image not built."""


class RegistryError(BuildError):
    """A registry refuses a call, or does not answer."""

    status = 0
    """The HTTP status; 0 where there was no answer."""


class LaunchError(ManycpuError):
    """The target did not accept the run: no MPI, no host, no such handle."""


class TrainingFailedError(ManycpuError):
    """The training ended badly; the message has the first rank that failed and its last lines."""


class CancelledError(ManycpuError):
    """Somebody ended the training."""


class DeadlineError(ManycpuError):
    """One of the run's time budgets was used up."""


class ExportError(ManycpuError):
    """The model did not reach the output whole."""


class LedgerError(ManycpuError):
    """The record of what a run owns cannot be read: another version of manycpu wrote it, perhaps."""


class RunGoneError(LedgerError, FileNotFoundError):
    """The run has not begun, or was taken away while it was worked on: its ledger or its claim is gone."""


class LeftBehindError(ManycpuError):
    """Something that the run made could not be deleted."""


@dataclass(frozen=True)
class Finding:
    """One thing that preflight found: what is wrong with which field, and what to do next."""

    field: str
    message: str
    fix: str
    fatal: bool = True

    def __str__(self) -> str:
        return str(BadInputError(self.message, field=self.field, fix=self.fix))


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise the fatal findings as one error.

    Raises:
        BadInputError: One line for each fatal finding.
    """
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        raise as_error(fatal)


def as_error(findings: Sequence[Finding]) -> BadInputError:
    """Tell findings as one error: one line for each."""
    if len(findings) == 1:
        return BadInputError(findings[0].message, field=findings[0].field, fix=findings[0].fix)
    lines = "\n".join(["several things need a change:", *(f"- {finding}" for finding in findings)])
    return BadInputError(lines)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":", "\n")) or "\n" in text else text + "."


def _rebuild(kind: type[ManycpuError], message: str, field: str | None, fix: str | None) -> ManycpuError:
    return kind(message, field=field, fix=fix)
