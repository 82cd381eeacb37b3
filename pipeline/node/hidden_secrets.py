"""Hide in what a rank prints the secrets that its run names: more people read a log than may know them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.credentials import HIDDEN, SHORTEST, secrets_in

__all__ = ["HiddenSecrets"]

_MARK: Final = events.PREFIX.encode()


class HiddenSecrets:
    """Replaces secrets in a rank's lines; of an event, in its message alone: values decide, and are returned.

    Args:
        environ: The rank's environment; of its variables those count that ``run.env`` has set.
        argv: The words that the program and its options are among.
    """

    def __init__(self, environ: Mapping[str, str], argv: Sequence[str]) -> None:
        names = environ.get("MANYCPU_USER_ENV", "").split(",")
        env = {name: environ[name] for name in names if name in environ}
        found = sorted(secrets_in({"env": env, "args": [*argv]}), key=len, reverse=True)
        self._texts = [text for text in found if len(text) >= SHORTEST]
        written = {form for text in self._texts for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1])}
        self._written = [
            form.encode(errors="surrogateescape") for form in sorted(written, key=len, reverse=True)
        ]

    def hide(self, line: bytes) -> bytes:
        """Hide them in a line, whose newline is not there yet."""
        if not any(form in line for form in self._written):
            return line
        if line.startswith(_MARK):
            return self._in_message(line)
        for form in self._written:
            line = line.replace(form, HIDDEN.encode())
        return line

    def _in_message(self, line: bytes) -> bytes:
        try:
            event: Any = json.loads(line[len(_MARK) :])
            message = event["message"]
            for text in self._texts:
                message = message.replace(text, HIDDEN)
            return events.encode(**{**event, "message": message}).encode()
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):  # it has no message
            return line
