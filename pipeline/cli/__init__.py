"""The command ``manycpu``: everything that it does works without Airflow."""

import errno
import os
import sys
from io import TextIOWrapper

import click

_EXIT_INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended

try:
    from manycpu.pipeline.cli import report_command, run_commands, spec_commands
    from manycpu.pipeline.spec.errors import DISK_FULL, BadInputError, ManycpuError
    from manycpu.pipeline.spec.words import did_you_mean
except KeyboardInterrupt:  # these imports take a second
    click.echo("manycpu: aborted", err=True)
    sys.exit(_EXIT_INTERRUPTED)

__all__ = ["cli", "main"]

_SYSTEM_ERRORS = frozenset(
    {errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.ESTALE}
    | {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
"""Errors that the machine or its administrator mends; others are faults of this program, with a traceback."""
_SYNONYMS = {
    "train": "run",
    "launch": "run",
    "list": "status",
    "ls": "status",
    "ps": "status",
    "check": "preflight",
    "validate": "preflight",
    "doctor": "preflight",
    "stop": "cancel",
    "kill": "cancel",
    "rm": "clean",
    "show": "report",
}
"""A name in other programs -> the command's name here."""


class _Commands(click.Group):
    """The commands; an unknown name is refused with the name of a similar one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names; fail with a suggestion if another one is meant."""
        name = args[0]
        suggestion = did_you_mean(_SYNONYMS.get(name, name), self.commands)
        if suggestion and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}. {suggestion}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="manycpu")
def cli() -> None:
    """Train PyTorch models on many CPUs: on this machine, on hosts of a hostfile, on Kubernetes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # it is None if it was closed before Python started
            stream.reconfigure(errors="backslashreplace")  # a rank may print what the stream cannot show
    if os.environ.get("COLUMNS") == "0":  # a terminal without a size; rich would print nothing
        del os.environ["COLUMNS"]


for _command in (*spec_commands.COMMANDS, *run_commands.COMMANDS, report_command.report):
    cli.add_command(_command)


def main() -> None:
    """Run the command; an error is one message and exit code 2 (bad input), 130 (interrupted) or 1.

    Errors that are faults of this program are raised.
    """
    try:
        cli(standalone_mode=False)
    except ManycpuError as error:
        click.echo(f"manycpu: {_with_notes(error, str(error))}", err=True)
        # A verb that Ctrl-C interrupts raises an error from it, which says what stays.
        was_interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        sys.exit(_EXIT_INTERRUPTED if was_interrupted else error.exit_code)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a path that the user gave
            click.echo(
                f"manycpu: a path is too long: {error.strerror}: {str(error.filename)[:100]}...", err=True
            )
            sys.exit(BadInputError.exit_code)
        where = f" at {error.filename}" if error.filename else ""
        if error.errno in DISK_FULL:
            message = f"a disk is full{where}: {error.strerror}. Make room, and run again."
        elif error.errno in _SYSTEM_ERRORS:
            message = f"the system refuses a call{where}: {error.strerror}. Mend that, and run again."
        else:
            raise
        click.echo(f"manycpu: {_with_notes(error, message)}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("manycpu: aborted", err=True)
        sys.exit(_EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


def _with_notes(error: BaseException, message: str) -> str:
    """Add to a message the notes of its error, each on a line of its own."""
    return "\n".join([message, *getattr(error, "__notes__", ())])
