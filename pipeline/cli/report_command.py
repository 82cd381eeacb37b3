"""The command report: show a run's report in the terminal, or write it as a page."""

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
from manycpu.pipeline.spec.credentials import redacted, without_secrets
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.output import PAGE, REPORT, fields_of, is_page
from manycpu.pipeline.verbs.report import newest_report

_BESIDE = "beside"  # value of --html without FILE


@click.command()
@click.argument("path", required=False, metavar="PATH")
@click.option(
    "--html",
    "page",
    metavar="[FILE]",
    is_flag=False,
    flag_value=_BESIDE,
    help=f"Write it as a page, one file that needs no other; without FILE to {PAGE} beside the report, or to "
    "the current folder if the report is behind a URL.",
)
def report(path: str | None, page: str | None) -> None:
    """Show the report of a run that has ended.

    PATH is a report.json, the folder or URL that a run wrote its model to, or its folder in `reports`;
    default: the report of the run of this machine that ended last.
    """
    path = _newest_path(page) if path is None else path
    if not path.strip():  # such as "$OUTPUT", if that variable is not set
        raise BadInputError("PATH is empty", fix="Give a report.json, or the folder or URL that has one")
    try:
        fields = _read(path)
        if page is None:
            console, checked = Console(), Report.model_validate(fields)
            display.summary(console, checked, redacted(path))
            display.failure(console, checked)
        else:
            file = _page_path(path) if page == _BESIDE else Path(page)
            click.echo(_write(file, as_html(fields)))
    except ValidationError as error:  # a page shows what fields there are, the terminal needs all
        wrong_fields = ", ".join(dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()))
        fix = "--html shows the fields that it has"
        raise BadInputError(f"{redacted(path)} is not a whole report: see {wrong_fields}", fix=fix) from error
    except RecursionError as error:
        raise BadInputError(f"{redacted(path)} cannot be read: it is nested too deeply") from error


def _newest_path(page: str | None) -> str:
    """Return the path or URL of the report of the run that ended last, for a command without PATH.

    Raises:
        UsageError: No run has ended here, or PATH was given as the FILE of --html by mistake.
    """
    if page not in (None, _BESIDE):  # click took the user's PATH as the FILE of --html
        fix = f"Type: manycpu report {quote(redacted(page))} --html"
        raise click.UsageError(f"Missing argument 'PATH': what follows --html is its FILE. {fix}")
    newest = newest_report()
    if newest is None:
        raise click.UsageError("Missing argument 'PATH': no run has ended on this machine.")
    return newest


def _read(path: str) -> dict[str, Any]:
    """Read the fields of the report that ``path`` is, or that a folder or URL has; some may be missing.

    Raises:
        BadInputError: There is no report, or it cannot be read.
    """
    try:
        text = Location.of(path, field="PATH").read_text(REPORT)  # in a folder; of a file, the file itself
    except BadInputError:  # it says what is wrong already
        raise
    except Exception as error:  # every protocol of fsspec has errors of its own
        raise BadInputError(without_secrets(f"{path} cannot be read: {error}", value=path)) from error
    if text is None:
        fix = "Give a report.json, or the folder or URL that a run wrote its model to"
        raise BadInputError(f"there is no {REPORT} at {redacted(path)}", fix=fix)
    fields = fields_of(text)
    if not fields.keys() & Report.model_fields.keys():
        raise BadInputError(
            f"{redacted(path)} is no report of a run", fix=f"Give what a run wrote as {REPORT}"
        )
    return fields


def _page_path(path: str) -> Path:
    """Return the page's path: beside the report, or in the current folder if the report is behind a URL."""
    if is_remote(path):
        return Path(PAGE)
    location = Path(Location.of(path, field="PATH").root)  # without the file:// that it may begin with
    return (location if location.is_dir() else location.parent) / PAGE


def _write(file: Path, text: str) -> Path:
    """Write a page and return its path; an existing file is replaced only if it is the page of a report.

    Raises:
        BadInputError: Another file is there, or the page cannot be written.
    """
    try:
        if file.exists() and not (file.is_file() and is_page(file.read_text(errors="replace"))):
            raise BadInputError(f"{file} exists, and is no page of a report", fix="Give another FILE")
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{file} cannot be written: {error.strerror}", fix="Give another FILE") from error
    return file
