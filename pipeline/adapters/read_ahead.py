"""Read parts of files ahead of their use, several at once: a store answers many requests as fast as one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Final

PART_BYTES: Final = 8 << 20
_PARALLEL_PARTS: Final = 8  # with one that the caller has, 72 MiB at most


def in_order(parts: Iterable[Callable[[], bytes]]) -> Iterator[bytes]:
    """Call functions that read parts, in threads and ahead of their use; yield the results in order.

    After an error, or if the caller stops, no further part is begun, and those under way are not waited for.
    """
    ahead: deque[Future[bytes]] = deque()
    for part in parts:
        ahead.append(_begin(part))
        if len(ahead) == _PARALLEL_PARTS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _begin(part: Callable[[], bytes]) -> "Future[bytes]":
    """Call a function in a daemon thread, which the process does not wait for; returns its future result."""
    future: Future[bytes] = Future()

    def read() -> None:
        """Put the result of ``part``, or its error, into the future."""
        try:
            future.set_result(part())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            future.set_exception(error)

    Thread(target=read, daemon=True).start()
    return future
