"""The Secret of a run: variables that are called like one, which pods are given and no manifest shows."""

import base64

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from manycpu.pipeline.spec.credentials import secret_variables
from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.spec.kube_object import is_being_deleted
from manycpu.pipeline.spec.naming import labels, secret_name
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of

__all__ = ["provide", "remove"]

_GOING = 60.0  # seconds in which one that is being deleted must be gone
_EVERY = 0.25  # seconds


def provide(ctx: ClusterContext) -> None:
    """Have the Secret hold what the run says now; it goes with the ledger.

    A run that was opened from its ledger knows no values, and leaves the Secret as it is.

    Raises:
        ClusterError: One with earlier values does not go.
    """
    values = secret_variables(ctx.run.env)
    if not values:
        return
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(ctx.name),
            "labels": labels(ctx.name),
            "ownerReferences": ctx.ledger.owner(),
        },
        "data": data,
    }
    retrying = Retrying(
        retry=retry_if_result(lambda present: present.get("data") != data or is_being_deleted(present)),
        stop=stop_after_delay(_GOING),
        wait=wait_fixed(_EVERY),
        before_sleep=lambda _: remove(ctx),  # manycpu has no right to change one
        retry_error_callback=lambda _: None,
    )
    if retrying(cluster_of(ctx).create, manifest) is None:
        raise ClusterError(
            f"Secret {ctx.target.namespace}/{secret_name(ctx.name)} has earlier values, and does not go",
            fix=f"See why: kubectl -n {ctx.target.namespace} describe secret {secret_name(ctx.name)}",
        )


def remove(ctx: ClusterContext) -> None:
    """Begin to delete the Secret, where there is one."""
    cluster_of(ctx).delete("Secret", secret_name(ctx.name))
