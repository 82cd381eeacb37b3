"""Locks hold across processes, also where the file is deleted by its holder."""

import threading
from pathlib import Path

from manycpu.pipeline.adapters.lock import locked


def test_only_one_at_a_time_also_when_each_deletes_the_file(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        for _ in range(50):
            with locked(tmp_path / "lock"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                (tmp_path / "lock").unlink()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 200
    assert max(most) == 1
