"""Build on machines: make a snapshot of the program's folder, named by its content."""

import logging

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.targets.machines.context import MachineContext, home_of
from manycpu.pipeline.targets.machines.shared_folders import bring
from manycpu.pipeline.targets.program_code import code_of, installed_digest, program_of
from manycpu.pipeline.targets.results import Built

__all__ = ["build"]

_DIGITS = 16
_log = logging.getLogger(__name__)


def build(ctx: MachineContext) -> tuple[Built, bool]:
    """Make a snapshot of the program's folder, or name the installed code; True: it existed before.

    Raises:
        BadInputError: The folder is too large to be code, or ignore files leave out the program.
    """
    root, arguments = program_of(ctx)
    if root is None:
        return Built(code=None, program=arguments, digest=installed_digest()), True
    source = code_of(ctx, root, arguments)
    _log.info("the code: %s", source)
    code, digest, reused = _snapshot(ctx, source.location)
    return Built(code=code, program=arguments, digest=digest), reused


def _snapshot(ctx: MachineContext, source: Location) -> tuple[str, str, bool]:
    digest = transfer.identity(source)
    folder, _, reused = bring(ctx, source, home_of(ctx) / "code" / digest[:_DIGITS], digest)
    return str(folder), digest, reused
