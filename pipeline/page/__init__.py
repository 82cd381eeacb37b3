"""A training's page: static files that Airflow serves, and the same as one HTML file (:mod:`.html`)."""

from manycpu.pipeline.page.html import as_frame, as_html

__all__ = ["as_frame", "as_html"]
