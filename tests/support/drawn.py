"""Values that hypothesis draws: how many of them, and texts and JSON that a person would not think of."""

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from cluster.settings import PROJECT
from hypothesis import HealthCheck, Phase, configuration, settings
from hypothesis import strategies as st

Test = TypeVar("Test", bound=Callable[..., Any])

# What hypothesis keeps between sessions: tables alone, as there is no database of examples.
configuration.set_hypothesis_home_dir(PROJECT / ".cache" / "hypothesis")
_FACTOR: Final = int(os.environ.get("MANYCPU_DRAWN") or 0)
"""Factor for the number of examples, which then differ in each session; 0: half, always the same ones."""


def drawn(examples: int, *, shrink: bool = True) -> Callable[[Test], Test]:
    """Return a decorator that makes a test run with so many examples, changed by ``_FACTOR``.

    ``shrink``: whether to look for a smaller example after a failure. False where an example takes seconds.
    """
    return settings(
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        max_examples=examples * _FACTOR or (examples + 1) // 2,
        derandomize=not _FACTOR,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


NASTY_TEXTS: Final = (
    "", " ", "-", "--", "-rf", "..", "/", "~", "*", "$HOME", "$(RANK)", "$$", "`id`", "$(id)", ";id", "|id",
    "&", "a b", "a\nb", "a\r\nb", "'", '"', "\\", "{data}", "{{x}}", "%s", "=", "A=B", "a,b", ":", "a:b",
    "null", "no", "é", "日本", "\x1b[31m", "\u2028", "\x1f", "\x7f", "\x85", "\ud800", "a/b", "[/b]",
    "<script>", "#", "x" * 300,
)  # fmt: skip
"""Texts with a special meaning to shells, Kubernetes, YAML, templates or terminals."""

texts: Final = st.sampled_from(NASTY_TEXTS) | st.text(max_size=8)
json_values: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(NASTY_TEXTS)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""Any JSON value, and NaN and infinity, which Python's reader accepts."""
