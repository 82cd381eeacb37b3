"""Configure the docs site: Sphinx with MyST and the theme Furo, all from packages, without a network.

The source folder is the root of the repository: a link means the same on the site and in the repository.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

project = "manycpu"
author = "the manycpu authors"
project_copyright = author
root_doc = "docs/index"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
# Nothing else is searched: folders with environments and caches hold a hundred thousand files.
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in ("docs", *PAGES)]
myst_heading_anchors = 4
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = "manycpu"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["redirect"]
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False  # options have two hyphens
