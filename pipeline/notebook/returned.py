"""Put together what rank 0 returned: it comes in parts, as events among its lines."""

import base64
from typing import Any

from manycpu.pipeline.spec.errors import ManycpuError

__all__ = ["Returned"]


class Returned:
    """What rank 0 of the present round returned, as far as it has come."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}
        self._count: int | None = None
        self._why_not: str | None = None

    def begin_round(self) -> None:
        """Forget what an earlier round returned, whose ranks were started anew since."""
        self._parts, self._count, self._why_not = {}, None, None

    def take(self, part: dict[str, Any]) -> None:
        """Take a part: ``part`` of ``parts`` with its ``text``, or a ``message`` why none can travel."""
        match part:
            case {"part": int(number), "parts": int(count), "text": str(text)}:
                self._count, self._why_not = count, part.get("message")
                if count:
                    self._parts[number] = text

    def value(self) -> Any:
        """Unpickle it.

        Raises:
            ManycpuError: It cannot travel, or did not arrive: the function ended the process, perhaps.
        """
        import cloudpickle

        if self._why_not is not None:
            raise ManycpuError(f"the training succeeded, but {self._why_not}")
        if self._count is None or len(self._parts) != self._count:
            raise ManycpuError(
                "the training succeeded, but nothing came back from the function",
                fix="It ends rank 0 itself, as sys.exit does: have it return",
            )
        text = "".join(text for _, text in sorted(self._parts.items()))
        return cloudpickle.loads(base64.b64decode(text))
