"""Write a report as one HTML file that loads nothing else. Airflow serves the same modules as static files.

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
"""In the order of their imports; their top-level names are all different."""
_IMPORTS_AND_EXPORTS: Final = re.compile(
    r"^(?:import|export) \{[^}]*\} from [^;]*;$\n?|^export (?=\w)", re.MULTILINE
)
_START: Final = """
const report = JSON.parse(document.getElementById("report").textContent);
mount(document.getElementById("page")).update({ report });
"""
_BODY_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 0; background: light-dark(#ffffff, #101215); }
"""


def as_html(report: Mapping[str, Any]) -> str:
    """Write a report as one self-contained HTML file.

    Args:
        report: The content of report.json, of any version; it may be incomplete.
    """
    name = report.get("name")
    title = f"{name} · manycpu" if isinstance(name, str) and name else "manycpu"
    # In ASCII: a name may have half of a character, which UTF-8 does not allow. The JSON is ASCII too.
    ascii_title = escape(title).encode("ascii", "xmlcharrefreplace").decode()
    script = _script()
    style = (_FOLDER / "training.css").read_text(encoding="utf-8") + _BODY_STYLE
    embedded = json.dumps(_plain(report), allow_nan=False, default=str)
    for unsafe in "<>&":  # these can end the element that the JSON is in, or begin a comment
        embedded = embedded.replace(unsafe, f"\\u{ord(unsafe):04x}")
    # A second guard beside the escapes: nothing that a report holds can run, or load anything.
    rules = f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:"
    policy = f"{rules}; base-uri 'none'; form-action 'none'"
    return f"""\
{PAGE_BEGINS}<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{ascii_title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="page"></div>
<noscript>This page draws a report with JavaScript; report.json has the same as text.</noscript>
<script type="application/json" id="report">{embedded}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def as_frame(report: Mapping[str, Any]) -> str:
    """Write a report as a frame for a notebook's cell; its scripts cannot reach the notebook's page."""
    frame = 'sandbox="allow-scripts" title="Report of a training" width="100%" height="640" style="border: 0"'
    return f'<iframe {frame} srcdoc="{escape(as_html(report))}"></iframe>'


def _plain(value: Any) -> Any:
    """Replace NaN and infinite numbers, which JSON does not have, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


@cache
def _script() -> str:
    """Join the JavaScript modules into one script, without their imports and exports."""
    modules = [(_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in _MODULES]
    return "\n".join([*(_IMPORTS_AND_EXPORTS.sub("", text) for text in modules), _START])


def _source(text: str) -> str:
    """Return what lets the page's Content-Security-Policy accept an inline script or style: its hash."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
