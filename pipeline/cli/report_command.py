"""The command report: a run's report in the terminal, or as a page."""

from pathlib import Path
from shlex import quote
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console

from manycpu.pipeline import display
from manycpu.pipeline.adapters.storage import Location, is_remote
from manycpu.pipeline.page import as_html
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.credentials import redacted, without
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.output import PAGE, REPORT, fields_of, is_page

__all__ = ["report"]

_BESIDE = "beside"  # no FILE was given


@click.command()
@click.argument("path", required=False, metavar="PATH")
@click.option(
    "--html",
    "page",
    metavar="[FILE]",
    is_flag=False,
    flag_value=_BESIDE,
    help=f"Write it as a page, one file that needs no other; without FILE to {PAGE} beside the report, or to "
    "the present folder where the report is behind a URL.",
)
def report(path: str | None, page: str | None) -> None:
    """Show the report of a run that has ended.

    PATH is a report.json, the folder or URL that a run wrote its model to, or its folder in `reports`.
    """
    if path is None:
        raise click.UsageError(_no_path(page))
    if not path.strip():  # such as that of a variable which is not set
        raise BadInputError("PATH is empty", fix="Give a report.json, or the folder or URL that has one")
    try:
        _show(path, page)
    except RecursionError as error:
        raise BadInputError(f"{redacted(path)} cannot be read: it is nested too deeply") from error


def _no_path(page: str | None) -> str:
    """Say what to type instead: a word behind --html is its FILE."""
    if page is None or page == _BESIDE:
        return "Missing argument 'PATH'."
    fix = f"Type: manycpu report {quote(redacted(page))} --html"
    return f"Missing argument 'PATH': what follows --html is its FILE. {fix}"


def _show(path: str, page: str | None) -> None:
    """Show a report in the terminal, or write its page.

    Raises:
        BadInputError: It cannot be read, or the page not be written.
    """
    fields = _read(path)
    if page is None:
        display.summary(Console(), _whole(path, fields), redacted(path))
    else:
        click.echo(_write(_beside(path) if page == _BESIDE else Path(page), as_html(fields)))


def _read(path: str) -> dict[str, Any]:
    """Read as much of a report as there is.

    Raises:
        BadInputError: There is none, or it cannot be read.
    """
    try:
        text = Location.of(path, "PATH").read_text(REPORT)
    except BadInputError:
        raise
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        raise BadInputError(without(f"{path} cannot be read: {error}", path)) from error
    if text is None:
        fix = "Give a report.json, or the folder or URL that a run wrote its model to"
        raise BadInputError(f"there is no {REPORT} at {redacted(path)}", fix=fix)
    fields = fields_of(text)
    if not fields.keys() & Report.model_fields.keys():
        raise BadInputError(
            f"{redacted(path)} is no report of a run", fix=f"Give what a run wrote as {REPORT}"
        )
    return fields


def _whole(path: str, fields: dict[str, Any]) -> Report:
    """Parse a report.

    Raises:
        BadInputError: It is half a report.
    """
    try:
        return Report.model_validate(fields)
    except ValidationError as error:
        wrong = ", ".join(dict.fromkeys(str(each["loc"][0]) for each in error.errors()))
        fix = "--html shows what it has"
        raise BadInputError(f"{redacted(path)} is not a whole report: see {wrong}", fix=fix) from error


def _beside(path: str) -> Path:
    if is_remote(path):
        return Path(PAGE)
    given = Path(Location.of(path, "PATH").root)
    return (given if given.is_dir() else given.parent) / PAGE


def _write(file: Path, text: str) -> Path:
    """Write a page; one of ours is replaced, and no other file.

    Raises:
        BadInputError: There is something else, or it cannot be written.
    """
    try:
        if file.exists() and not is_page(file.read_text(errors="replace")):
            raise BadInputError(f"{file} exists, and is no page of a report", fix="Give another FILE")
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{file} cannot be written: {error.strerror}", fix="Give another FILE") from error
    return file
