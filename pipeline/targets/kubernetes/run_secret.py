"""The Secret of a run: variables of ``run.env`` whose name or URL shows that their value is a secret.

Pods refer to the Secret, so that no manifest of a pod shows the values.
"""

import base64

from manycpu.pipeline.adapters.cluster import poll
from manycpu.pipeline.spec.credentials import secret_variables
from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.spec.kube_object import KubeObject, is_being_deleted
from manycpu.pipeline.spec.naming import labels, secret_name
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.deletion import is_owned

_DELETION_TIMEOUT_S = 60.0  # within which an outdated Secret must be gone


def provide(ctx: ClusterContext) -> None:
    """Create the run's Secret with its secret variables; replace an existing one that has other values.

    The ledger owns the Secret. Nothing happens if no values are known: a run that was opened from its ledger
    has only hidden ones, and keeps the existing Secret.

    Raises:
        ClusterError: The existing Secret is not this run's, or it is not deleted within a minute.
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

    uid = ctx.ledger.uid()

    def create() -> bool:
        """Create the Secret; False: an outdated one is being deleted, call this function again."""
        created = cluster_of(ctx).create(manifest)  # returns the existing one if there is one
        refuse_foreign(ctx, created)
        # Kubernetes deletes an earlier ledger's Secret, even if it has the same values.
        is_own = is_owned(created, ctx.name, uid)
        is_current = created.get("data") == data and not is_being_deleted(created)
        if is_own and not is_current:
            remove(ctx)  # and create it again later: manycpu has no right to change a Secret
        return is_own and is_current

    if not poll(create, done=bool, timeout_s=_DELETION_TIMEOUT_S):
        raise ClusterError(
            f"Secret {ctx.target.namespace}/{secret_name(ctx.name)} has earlier values, and does not go",
            fix=f"See why: kubectl -n {ctx.target.namespace} describe secret {secret_name(ctx.name)}",
        )


def refuse_foreign(ctx: ClusterContext, secret: KubeObject | None) -> None:
    """Raise ClusterError if no ledger of this name owns the Secret: a person has created it."""
    if secret is not None and not is_owned(secret, ctx.name, None):
        where, name = ctx.target.namespace, secret_name(ctx.name)
        raise ClusterError(
            f"there is a Secret {where}/{name} that is not of this run",
            field="target.namespace",
            fix=f"`kubectl -n {where} delete secret {name}` if you may, and run again",
        )


def remove(ctx: ClusterContext) -> None:
    """Begin the deletion of the Secret, if the run's ledger owns one."""
    name = secret_name(ctx.name)
    secret = cluster_of(ctx).get("Secret", name)
    if secret is not None and is_owned(secret, ctx.name, ctx.ledger.uid()):
        cluster_of(ctx).delete("Secret", name, uid=secret["metadata"]["uid"])
