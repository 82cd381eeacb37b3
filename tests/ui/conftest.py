"""A browser for the tests of pages."""

from support.browser import chromium, page

__all__ = ["chromium", "page"]
