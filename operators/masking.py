"""Credentials in URLs of a run, kept out of Airflow's logs and of its view of rendered templates."""

from __future__ import annotations

from typing import Any

__all__ = ["mask"]


def mask(*fields: Any) -> None:
    """Have Airflow show stars for them, in tracebacks of libraries too."""
    from airflow.sdk.log import mask_secret

    from manycpu.pipeline.spec.credentials import secrets_in

    for secret in secrets_in(fields):
        mask_secret(secret)
