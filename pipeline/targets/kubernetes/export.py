"""Export the model from the claim: over a stream to this machine, or by a pod with the volume to a URL."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from manycpu.pipeline.adapters.storage import is_remote
from manycpu.pipeline.pod import client
from manycpu.pipeline.spec import rank_logs
from manycpu.pipeline.spec.credentials import without_secrets
from manycpu.pipeline.spec.errors import ExportError, RunGoneError
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.targets.kubernetes.context import (
    ClusterContext,
    attempt_directory,
    claim_of,
    is_readable,
)
from manycpu.pipeline.targets.kubernetes.volume.claims import with_volume_of
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper, helper
from manycpu.pipeline.transfer import Manifest, Progress, TransferError

_LOG_START_TIMEOUT_S: Final = 60  # for the pod that reads logs; short, as a report may lack them


def export(ctx: ClusterContext, handle: JobHandle, progress: Progress) -> Manifest:
    """Copy the files that the program wrote to the run's output; return the manifest of these files.

    The manifest is empty if the program wrote none.

    Raises:
        ExportError: The output cannot be written, or differs from the files when it is read back.
        ClusterError: The cluster refuses the pod.
        DeadlineError: The pod did not start, or was lost repeatedly.
    """
    ctx = with_volume_of(ctx, ctx.ledger.read(), handle.attempt)
    source = f"{attempt_directory(ctx, handle.attempt)}/output"
    try:
        with helper(ctx, "export", claim_of(ctx), progress) as pod:
            if is_remote(ctx.destination):
                request = {"source": source, "url": ctx.destination, "key": ctx.claim_key}
                return pod.run("publish", lambda channel: client.publish(channel, **request))
            return _pull(ctx, pod, source)
    except RunGoneError:  # also an OSError, but the output is not at fault
        raise
    except (TransferError, OSError) as error:
        fix = f"The model is kept in {model_of(ctx, handle)}: mend the output, and run again "
        raise ExportError(
            without_secrets(f"{ctx.destination} was not written: {error}", ctx.destination),
            field="run.output",
            fix=fix + "with the same run id",
        ) from error


def _pull(ctx: ClusterContext, pod: Helper, source: str) -> Manifest:
    """Copy the folder ``source`` of the volume, through the pod, to the output, a folder of this machine.

    Raises:
        ExportError: The output is no folder of this machine.
    """
    output = ctx.output.local
    if output is None:
        raise ExportError(f"{ctx.destination} is no folder of this machine", field="run.output")
    return pod.run("send", lambda channel: client.pull(channel, source, output, ctx.claim_key, pod.report))


def read_returned(ctx: ClusterContext, handle: JobHandle, name: str) -> bytes:
    """Read one file of the value that a notebook's function returned.

    The value is a folder of files on the volume. A pod that mounts the volume sends all of these files to
    this machine; the content of the file ``name`` is returned.

    Raises:
        ClusterError: The cluster refuses the pod.
        DeadlineError: The pod did not start, or was lost repeatedly.
        OSError: The file does not exist.
    """
    ctx = with_volume_of(ctx, ctx.ledger.read(), handle.attempt)
    source = f"{attempt_directory(ctx, handle.attempt)}/{RETURNED}"
    with (
        TemporaryDirectory(prefix="manycpu-returned-") as folder,
        helper(ctx, "returned", claim_of(ctx), lambda *_: None) as pod,  # the lambda: no progress is shown
    ):
        copy = Path(folder, "copy")  # a new folder, which the transfer makes
        pod.run("send", lambda channel: client.pull(channel, source, copy, ctx.key, pod.report))
        return (copy / name).read_bytes()


def read_log(ctx: ClusterContext, handle: JobHandle) -> list[str]:
    """Read the last lines of an attempt's ranks, through a pod that mounts the volume.

    Returns an empty list if the claim does not exist, has no volume yet, or is being deleted.

    Raises:
        ClusterError: The cluster refuses the pod.
        DeadlineError: The pod did not start within a minute, or was lost repeatedly.
        TransferError: The volume cannot be read.
    """
    ctx = with_volume_of(ctx, ctx.ledger.read(), handle.attempt)
    if not is_readable(ctx):
        return []
    folder = f"{attempt_directory(ctx, handle.attempt)}/{rank_logs.FOLDER}"
    claim = claim_of(ctx)
    with helper(ctx, "logs", claim, progress=lambda *_: None, start_timeout=_LOG_START_TIMEOUT_S) as pod:
        return list(pod.ask("logs", folder=folder)["lines"])


def model_of(ctx: ClusterContext, handle: JobHandle) -> str:
    """Name the folder that the program of an attempt wrote to, and its claim, for messages."""
    where = f"claim {ctx.target.namespace}/{claim_of(ctx)}"
    return f"{attempt_directory(ctx, handle.attempt)}/output of {where}"
