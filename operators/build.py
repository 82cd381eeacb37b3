"""build: freeze the code that will run, and what it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained, require_begun

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["BuildImageOperator"]


class BuildImageOperator(RunOperator):
    """Snapshot the code, named by its content; on Kubernetes, put it upon the image and push that."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Build; returns the code's folder or the image, by digest.

        Raises:
            AirflowFailException: Bad input, such as a program's folder that holds more than code.
            BuildError: The image cannot be built or pushed.
        """
        from manycpu.pipeline.verbs.build import build

        with explained():
            built = build(require_begun(self.open(context)))
        self.log.info("%s, code sha256 %s", built.image or built.code or "code as installed", built.digest)
        return built.model_dump(mode="json")
