"""build: freeze the code that will run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["BuildImageOperator"]


class BuildImageOperator(RunOperator):
    """Make what stands for the image: locally, a snapshot of the code named by its content."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Build; returns what runs, and its digest.

        Raises:
            AirflowFailException: Bad input, such as a program's folder that holds more than code.
            BuildError: The image cannot be built.
        """
        from manycpu.pipeline.verbs.build import build

        with explained():
            built = build(self.open(context))
        self.log.info("code: %s, sha256 %s", built.code or "as installed", built.digest)
        return built.model_dump(mode="json")
