"""A browser for the tests of pages, and what it opens."""

from support.browser import chromium, page
from support.drawn_pages import mounted, shown

__all__ = ["chromium", "mounted", "page", "shown"]
