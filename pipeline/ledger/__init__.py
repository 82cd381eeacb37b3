"""The ledger of a run: what it owns and how far it got, recorded before anything it names exists."""

from manycpu.pipeline.ledger.base import Ledger
from manycpu.pipeline.ledger.entry import Attempt, End, Entry, Result, VerbRecord

__all__ = ["Attempt", "End", "Entry", "Ledger", "Result", "VerbRecord"]
