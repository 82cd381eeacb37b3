"""A report as one HTML file, which loads nothing and runs nothing but the code of the page itself.

>>> "<img" in as_html({"name": "<img src=x>"})
False
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec.output import PAGE_BEGINS

__all__ = ["as_frame", "as_html"]

_FOLDER: Final = Path(__file__).parent
_MODULES: Final = (
    *("dom", "chart", "curves", "ranks", "places", "sections"),
    *("better", "differences", "history", "training"),
)
"""In the order in which each finds what it imports; no two have a name at the top in common."""
_LINKS: Final = re.compile(r"^(?:import|export) \{[^}]*\} from [^;]*;$\n?|^export (?=\w)", re.MULTILINE)
_START: Final = """
const report = JSON.parse(document.getElementById("report").textContent);
mount(document.getElementById("page")).update({ report });
"""
_AROUND: Final = """
:root { color-scheme: light dark; }
body { margin: 0; background: light-dark(#ffffff, #101215); }
"""
_FRAME: Final = (
    'sandbox="allow-scripts" title="Report of a training" width="100%" height="640" style="border: 0"'
)
_UNSAFE: Final = re.compile("[<>&]")
"""What would end an element, or begin a comment."""


def as_html(report: Mapping[str, Any]) -> str:
    """Write a report as one self-contained HTML file.

    Args:
        report: The content of report.json, of any version, or as much of it as there is.
    """
    name = report.get("name")
    title = f"{name} · manycpu" if isinstance(name, str) and name else "manycpu"
    script, style = _script(), _style()
    rules = f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:"
    policy = f"{rules}; base-uri 'none'; form-action 'none'"
    return f"""\
{PAGE_BEGINS}<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title).encode("ascii", "xmlcharrefreplace").decode()}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="page"></div>
<noscript>This page draws a report with JavaScript; report.json has the same as text.</noscript>
<script type="application/json" id="report">{_embedded(report)}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def as_frame(report: Mapping[str, Any]) -> str:
    """Write a report as a frame for a cell of a notebook, whose own page it cannot touch.

    Args:
        report: As of :func:`as_html`.
    """
    return f'<iframe {_FRAME} srcdoc="{escape(as_html(report))}"></iframe>'


def _embedded(report: Mapping[str, Any]) -> str:
    """Serialise a report so that nothing in it ends the element which it stands in."""
    text = json.dumps(_plain(report), allow_nan=False, default=str)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _plain(value: Any) -> Any:
    """Write numbers that JSON does not have as words, and keep everything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value


@cache
def _script() -> str:
    """Join the modules into one."""
    modules = [(_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in _MODULES]
    return "\n".join([*(_LINKS.sub("", text) for text in modules), _START])


@cache
def _style() -> str:
    return (_FOLDER / "training.css").read_text(encoding="utf-8") + _AROUND


def _source(text: str) -> str:
    """Name an element of the page by its content, as its policy wants it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
