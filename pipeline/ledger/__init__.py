"""The ledger of a run: what it owns and how far it got, recorded before anything it names exists."""

from manycpu.pipeline.ledger.base import (
    CLEANUP,
    VERBS,
    Attempt,
    End,
    Entry,
    Lease,
    Ledger,
    Result,
    VerbRecord,
    Verbs,
)

__all__ = [
    "CLEANUP",
    "VERBS",
    "Attempt",
    "End",
    "Entry",
    "Lease",
    "Ledger",
    "Result",
    "VerbRecord",
    "Verbs",
]
