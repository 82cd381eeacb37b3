"""Whoever tracks may fail, or never answer: neither is an error of what goes on here."""

import threading
from collections.abc import Callable

__all__ = ["failure"]


def failure(act: Callable[[], None], seconds: float) -> str | None:
    """Say why something failed, or that it took too long: its thread is then left to itself."""
    failures: list[str] = []

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own, and none fails a run
            failures.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=run, name="tell a tracker", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"it has not answered within {seconds:g} s"
    return failures[0] if failures else None
