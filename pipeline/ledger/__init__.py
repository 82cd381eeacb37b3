"""The ledger of a run: what it owns and how far it got, recorded before anything it names exists."""

from manycpu.pipeline.ledger.base import CLEANUP, Attempt, End, Entry, Lease, Ledger, Result, VerbRecord

__all__ = ["CLEANUP", "Attempt", "End", "Entry", "Lease", "Ledger", "Result", "VerbRecord"]
