"""build: freeze the code that will run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, begun, explained

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["BuildImageOperator"]


class BuildImageOperator(RunOperator):
    """Make what stands for the image: locally, a snapshot of the code named by its content."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Build; returns what runs, and its digest.

        Raises:
            AirflowFailException: Bad input.
            BuildError: The program's folder holds more than code.
        """
        from manycpu.pipeline.verbs.build import build

        with explained():
            built = build(begun(self.open(context)))
        self.log.info("code: %s, sha256 %s", built.code or "as installed", built.digest)
        return built.model_dump(mode="json")
