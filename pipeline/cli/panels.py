"""Help in panels: first what most runs need, with ``--help-all`` every option and all of its text."""

import re
from typing import Any

import click

__all__ = ["PanelCommand", "PanelOption"]

_ALL = "manycpu.help_all"
_CLAUSE_END = re.compile(r"[.;] ")
_OTHERS = "Options"  # the panel of options that name none


class PanelOption(click.Option):
    """An option in a panel of the help, which shows the first clause of its text.

    Args:
        panel: Title of the panel.
    """

    def __init__(self, *args: Any, panel: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.panel = panel

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help, as click asks for it."""
        record = super().get_help_record(ctx)
        if record is None or ctx.meta.get(_ALL):
            return record
        return record[0], _CLAUSE_END.split(record[1], maxsplit=1)[0].rstrip(".") + "."


class PanelCommand(click.Command):
    """A command whose help has panels.

    Args:
        advanced: Titles of panels that ``--help-all`` alone shows.
    """

    def __init__(self, *args: Any, advanced: tuple[str, ...] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._advanced = advanced
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help=f"Show every option, with all of its text{_of(advanced)}, and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the panels."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):
                continue
            panel = getattr(param, "panel", _OTHERS)
            record = param.get_help_record(ctx)
            if record and (ctx.meta.get(_ALL) or panel not in self._advanced):
                panels.setdefault(panel, []).append(record)
        others = panels.pop(_OTHERS, [])
        for panel, records in [*panels.items(), (_OTHERS, others)]:
            with formatter.section(panel):
                formatter.write_dl(records)


def _of(panels: tuple[str, ...]) -> str:
    return f", also of {' and '.join(panel.lower() for panel in panels)}" if panels else ""


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
