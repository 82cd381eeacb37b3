"""What rank 0 returned: told in an event, by its value or by the digest of a file of the run."""

import hashlib
from collections.abc import Callable
from typing import Any

from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.event_types import ResultEvent

__all__ = ["Returned"]


class Returned:
    """What rank 0 of the present round returned, as far as it has come."""

    def __init__(self) -> None:
        self._result: ResultEvent | None = None
        self._content: bytes | None = None
        self._unread: Exception | None = None

    def begin_round(self) -> None:
        """Forget what an earlier round returned, whose ranks were started anew since."""
        self._result = None

    def take(self, result: ResultEvent) -> None:
        """Take what rank 0 tells of it."""
        self._result = result

    def read(self, read: Callable[[str], bytes]) -> None:
        """Read its file, where it has one, by the name of the file; an error comes with the value."""
        if self._result is None or self._result.sha256 is None:
            return
        try:
            self._content = read(self._result.sha256)
        except Exception as error:  # noqa: BLE001 - whatever hides it, the model is still to be exported
            self._unread = error

    def value(self) -> Any:
        """Return it; a file is unpickled only if rank 0 told its digest.

        Raises:
            ManycpuError: It cannot travel, or did not arrive: the function ended the process, perhaps.
        """
        import cloudpickle

        match self._result:
            case None:
                raise ManycpuError(
                    "the training succeeded, but nothing came back from the function",
                    fix="It ends rank 0 itself, as sys.exit does: have it return",
                )
            case ResultEvent(message=str(why_not)):
                raise ManycpuError(f"the training succeeded, but {why_not}")
            case ResultEvent(sha256=None):
                return self._result.value
        if self._content is None:
            raise ManycpuError(
                f"the training succeeded, but what the function returned could not be read: {self._unread}"
            )
        if hashlib.sha256(self._content).hexdigest() != self._result.sha256:
            raise ManycpuError("the training succeeded, but what the function returned was changed since")
        return cloudpickle.loads(self._content)
