"""The example notebook, whole, in a real kernel."""

from pathlib import Path

import pytest
from support.notebooks import EXAMPLES, executed


@pytest.mark.timeout(3600)  # it trains for a minute on a quiet machine, and nothing here is about time
def test_the_example_learns_on_two_processes(tmp_path: Path) -> None:
    *_, launched = executed(EXAMPLES / "images.ipynb", tmp_path, {"MANYCPU_HOME": str(tmp_path / "home")})
    assert not launched.error, launched.error
    assert float(launched.value) > 90
    assert "accuracy 9" in launched.shown
