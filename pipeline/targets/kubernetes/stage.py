"""Stage sources on the claim: this machine sends its files to a pod with the volume; the pod reads a URL."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from manycpu.pipeline import run_report
from manycpu.pipeline.adapters.storage import Location, is_remote
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import RemoteError
from manycpu.pipeline.spec.credentials import without_secrets
from manycpu.pipeline.spec.errors import BadInputError, ExportError, RunGoneError, StageError
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.context import Copied
from manycpu.pipeline.targets.kubernetes import output_report
from manycpu.pipeline.targets.kubernetes.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.volume.claims import ensure_claim
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper, helper
from manycpu.pipeline.transfer import Progress, TransferError


def stage(ctx: ClusterContext, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
    """Copy each source to the claim, into a folder whose name is the digest of its content.

    If only pods reach the output, also claim the output, and write the first report there.

    Args:
        ctx: The run.
        sources: Name of the field, ``data`` or ``model`` -> its path or URL.
        progress: Called with the bytes that are done, and bytes in all.

    Returns:
        Name of the field -> where the copy is, and whether it was there already.

    Raises:
        StageError: The source changed or cannot be read, or the volume is full.
        BadInputError: The output is a URL, and has files that the run did not write.
        ExportError: The output is a URL that pods cannot write to.
        ClusterError: The claim does not exist, or the cluster refuses the pod.
        DeadlineError: The pod did not start in time, or was lost repeatedly.
    """
    claim = ensure_claim(ctx)
    if not sources and not ctx.output_in_cluster:
        return {}
    with helper(ctx, "stage", claim, progress) as pod:
        if ctx.output_in_cluster:
            _begin_report(ctx, pod)
        return {name: _stage_one(ctx, pod, name, url) for name, url in sources.items()}


def _begin_report(ctx: ClusterContext, pod: Helper) -> None:
    """Claim the output, which only pods reach, and write a first report: faults show before the training.

    Raises:
        BadInputError: The output has other files, or another run has claimed it.
        ExportError: The output cannot be read or written.
    """
    first_report = run_report.draft(ctx.ledger.read(), Observed(), RunState.RUNNING)
    try:
        if ctx.run.output is not None:
            output_report.claim(ctx, pod)
        try:
            output_report.begin(ctx, pod, run_report.as_json(first_report))
        except BadInputError:  # the output has other files: the run will not start, so release the output
            output_report.release(ctx, pod)
            raise
    except TransferError as error:
        text = f"{ctx.destination} cannot be written from inside the cluster: {error}"
        is_wrong_url = isinstance(error, RemoteError) and error.reason == "input"
        raise ExportError(
            without_secrets(text, ctx.destination),
            field="run.output",
            fix=_FIXES["input" if is_wrong_url else "output"],
        ) from error


def _stage_one(ctx: ClusterContext, pod: Helper, name: str, url: str) -> Copied:
    """Copy the source of the field ``name``. The pod reads a URL; this machine sends the files of a path.

    Raises StageError if the copy fails.
    """
    field = f"run.{name}"
    folder = f"{ctx.target.home}/{name}"
    try:
        if is_remote(url):
            answer = pod.ask("fetch", url=url, folder=folder, field=field)
            return Copied(answer["path"], answer["sha256"], answer["reused"])
        source = Location.of(url, field)
        answer = pod.run("receive", lambda channel: client.push(channel, source, folder))
        path = PurePosixPath(answer["path"])
        if source.is_file():  # the copy is a folder with this file
            path /= source.name
        return Copied(str(path), answer["sha256"], answer["reused"])
    except RunGoneError:  # also an OSError, but the source is not at fault
        raise
    except (TransferError, OSError) as error:
        if isinstance(error, RemoteError):  # the pod failed, and says why
            reason = error.reason
        elif isinstance(error, TransferError):  # of this machine: the source changed while it was sent
            reason = "changed"
        else:
            reason = "unreadable"
        text = without_secrets(f"{url} was not staged: {error}", url)
        raise StageError(text, field=field, fix=_FIXES[reason]) from error


_FIXES = {  # reason of an error -> fix
    "input": "Mend the URL, or add the package to the helper image: HELPER_REQUIREMENTS in target.build_args"
    ", or another target.helper_image",
    "unreadable": "See that all of it can be read here",
    "changed": "Stage again when nothing writes to it",
    "full": "Make room on the claim, or name a larger one in target.claim or target.claim_size",
    "forbidden": "Let user 1000 of the pods write there: see fsGroup of the claim's storage class",
    "memory": "Put the files into fewer, larger ones (archives, shards)",
    "stuck": "See that the claim's volume answers, and run again: the copy resumes",
    "image": "See that target.helper_image has Python 3.11 or later and manycpu's dependencies",
    "output": "See that the pods can write to it: run.env_from names the secrets that they are given",
    "other": "See that the pods can read it: run.env_from names the secrets that they are given",
}
