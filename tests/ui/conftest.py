"""A browser for the tests of pages."""

from support.browser import page

__all__ = ["page"]
