"""export: copy the trained model out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained, require_begun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Asset, Context
    from airflow.sdk.definitions.xcom_arg import XComArg

    from manycpu.pipeline.verbs.export import Exported

__all__ = ["ExportModelOperator", "describe"]


class ExportModelOperator(RunOperator):
    """Bring the trained model to the run's output, verified, in one step.

    Args:
        handle: What ``train`` returned; it says which run this is.
        asset: The asset that the model is; its event carries the path, the digest and the metrics as extra.
        kwargs: ``run``, ``target``, and what every operator of Airflow takes.
    """

    template_fields = (*RunOperator.template_fields, "handle")

    def __init__(
        self,
        *,
        handle: Mapping[str, Any] | XComArg,
        asset: Asset | None = None,
        training: str | None = None,
        **kwargs: Any,
    ) -> None:
        outlets = [*kwargs.pop("outlets", ()), *([asset] if asset is not None else ())]
        super().__init__(training=training, outlets=outlets, **kwargs)
        self.handle = handle
        self.asset = asset

    def execute(self, context: Context) -> dict[str, Any]:
        """Export; returns the path, the number of files and bytes, the manifest's sha256 and the metrics.

        Raises:
            AirflowFailException: Bad input.
            ExportError: There is no model, or it did not reach the output whole.
        """
        from manycpu.pipeline.spec.handle import read_handle
        from manycpu.pipeline.verbs.export import export

        with explained():
            handle = read_handle(self.handle)
            exported = export(require_begun(self.open(context, handle.run)), handle, self.transferred())
        if exported.path is None:
            self.log.info("run.output is null: there is no model to export")
        else:
            self.log.info("%s: %d files, manifest sha256 %s", exported.path, exported.files, exported.sha256)
        if self.asset is not None:
            describe(self.asset, context, exported)
        return exported.model_dump(mode="json")


def describe(asset: Asset, context: Context, exported: Exported) -> None:
    """Have an asset's event carry the path, the digest and the metrics of the model as its extra."""
    fields = exported.model_dump(mode="json")
    context["outlet_events"][asset].extra = {name: fields[name] for name in ("path", "sha256", "metrics")}
