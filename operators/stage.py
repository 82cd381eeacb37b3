"""stage: bring the data set and the base model to the volume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained, require_begun

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["StageDatasetOperator"]


class StageDatasetOperator(RunOperator):
    """Copy what is not there yet, verified; a retry takes up where a break came."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Stage; returns where the data and the model are on every node, and their digests.

        Raises:
            AirflowFailException: Bad input.
            StageError: The source changed, cannot be read, or the disk is full.
        """
        from manycpu.pipeline.verbs.stage import stage

        with explained():
            staged = stage(require_begun(self.open(context)), self.transferred())
        for name, digest in staged.digests.items():
            self.log.info("%s: %s, manifest sha256 %s", name, getattr(staged, name), digest)
        return staged.model_dump(mode="json")
