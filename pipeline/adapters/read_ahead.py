"""Read parts of files ahead of their use, several at once: a store answers many requests as fast as one."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

PART_BYTES: Final = 8 << 20
_AT_ONCE: Final = 8  # so at most 64 MiB are in memory


def in_order(parts: Iterable[Callable[[], bytes]]) -> Generator[bytes]:
    """Call functions that read parts, in threads and ahead of their use; yield the results in order.

    After an error, or if the caller stops, no further part is begun.
    """
    ahead: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for part in parts:
                ahead.append(pool.submit(part))
                if len(ahead) == _AT_ONCE:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
