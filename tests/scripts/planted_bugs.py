"""Bugs for trials of faults to find: each function plants one, in the process of a command."""

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.spec.naming import label
from manycpu.pipeline.targets.kubernetes import cleanup, deletion, launch
from manycpu.pipeline.verbs import cleanup as cleanup_verb


def never_attaches():
    """A launch never attaches to what an earlier one has started."""
    launch.goes_on = lambda *_: False


def exports_by_the_ledger():
    """A run counts as exported without a look at the model."""
    cleanup_verb.seen = lambda *_: True


def deletes_names_that_begin_so():
    """A clean-up deletes objects of runs whose names begin with its own."""

    def present(ctx, _):
        items = [item for kind in deletion.kinds() for item in ctx.access.opened["ml"].list(kind)]
        return [item for item in items if label(item, "run").startswith(ctx.name)]

    cleanup.present = deletion.present = present


def never_asks_again():
    """A request that fails is not sent again, and its error not explained."""
    Cluster._ask = lambda cluster, method, path, query, body, _: cluster._call(method, path, query, body)
