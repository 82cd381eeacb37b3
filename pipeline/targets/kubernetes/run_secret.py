"""The Secret of a run: the variables with secrets, by name or in a URL, so that no manifest shows them."""

import base64

from manycpu.pipeline.adapters.cluster import poll
from manycpu.pipeline.spec.credentials import secret_variables
from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.spec.kube_object import is_being_deleted
from manycpu.pipeline.spec.naming import labels, secret_name
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of

_DELETION_TIMEOUT_S = 60.0  # of an outdated Secret


def provide(ctx: ClusterContext) -> None:
    """Create the run's Secret with its secret variables; replace one that has earlier values.

    The ledger owns the Secret. A run that was opened from its ledger has no values: its Secret stays.

    Raises:
        ClusterError: The Secret with earlier values is not deleted in time.
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

    def create() -> bool:
        """Create the Secret; false: an earlier one is being deleted, and this must be called again."""
        created = cluster_of(ctx).create(manifest)  # returns the existing one if there is one
        is_current = created.get("data") == data and not is_being_deleted(created)
        if not is_current:
            remove(ctx)  # manycpu has no right to change a Secret
        return is_current

    if not poll(create, done=bool, timeout_s=_DELETION_TIMEOUT_S):
        raise ClusterError(
            f"Secret {ctx.target.namespace}/{secret_name(ctx.name)} has earlier values, and does not go",
            fix=f"See why: kubectl -n {ctx.target.namespace} describe secret {secret_name(ctx.name)}",
        )


def remove(ctx: ClusterContext) -> None:
    """Begin the deletion of the Secret, if it exists."""
    cluster_of(ctx).delete("Secret", secret_name(ctx.name))
