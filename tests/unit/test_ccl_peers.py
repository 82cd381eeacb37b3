"""How the ranks of a group find each other, also in a store that has seen another meeting."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore  # type: ignore[attr-defined]

from manycpu.pipeline.node.ccl import peers
from manycpu.pipeline.node.ccl.peers import Peers, connect

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.3)
HERE = "127.0.0.1"


def meet(store: HashStore, size: int) -> list[Peers]:
    with ThreadPoolExecutor(size) as pool:
        coming = [pool.submit(connect, store, rank, size, LONG, HERE) for rank in reversed(range(size))]
        return [one.result() for one in reversed(coming)]


def stale(store: HashStore, *, answers: bool) -> socket.socket:
    """Leave the address of a rank 0 that is gone: its port is closed, or somebody else's."""
    other = socket.create_server((HERE, 0))
    store.set("peers", f"{HERE} {other.getsockname()[1]} old rank 0 on gone")
    if not answers:
        other.close()
    return other


def test_each_rank_is_connected_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MANYCPU_HOST", "here")
    first, *others = meet(HashStore(), 3)
    assert [len(first.connections), *(len(other.connections) for other in others)] == [2, 1, 1]
    assert first.names == ["rank 7 on here"] * 2
    assert {other.token for other in others} == {first.token}
    for link in [link for one in (first, *others) for link in one.connections]:
        link.close()


@pytest.mark.parametrize("answers", [True, False])
def test_an_address_of_an_earlier_meeting_is_not_taken(*, answers: bool) -> None:
    store = HashStore()
    with stale(store, answers=answers) as other, ThreadPoolExecutor(1) as pool:
        second = pool.submit(connect, store, 1, 2, LONG, HERE)
        if answers:
            other.settimeout(LONG.total_seconds())
            other.accept()[0].close()
        first = connect(store, 0, 2, LONG, HERE)
        assert second.result().token == first.token
        for link in [*first.connections, *second.result().connections]:
            link.close()


def test_a_program_that_connects_and_is_silent_does_not_use_up_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_GREETING_TIMEOUT_S", 0.2)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect, store, 0, 2, LONG, HERE)
        store.wait(["peers"], LONG)
        address, port, *_ = store.get("peers").decode().split()
        with socket.create_connection((address, int(port))):
            second = pool.submit(connect, store, 1, 2, LONG, HERE)
            met = [first.result(), second.result()]
    assert met[0].token == met[1].token
    for link in [link for one in met for link in one.connections]:
        link.close()


def test_who_did_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 of the group did not come"):
        connect(HashStore(), 0, 3, SHORT, HERE)


def test_a_first_rank_that_does_not_answer_is_named() -> None:
    store = HashStore()
    stale(store, answers=False)
    with pytest.raises(TimeoutError, match=r"rank 0 on gone, rank 0 of the group, did not answer at 127"):
        connect(store, 1, 2, SHORT, HERE)
