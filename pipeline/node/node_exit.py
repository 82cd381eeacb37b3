"""The exit codes of a rank that are ours and not the script's."""

from typing import Final

__all__ = ["BACKEND", "NEVER_INITIALISED", "PROOF", "RETURNED", "NodeExit"]

NEVER_INITIALISED: Final = 86
PROOF: Final = 87
BACKEND: Final = 88
RETURNED: Final = 89


class NodeExit(SystemExit):
    """Ends the rank with one of these codes; no ``except Exception`` of a script swallows it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message
