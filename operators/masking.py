"""Mask what is secret in a run, in Airflow's logs and in its view of rendered templates."""

from __future__ import annotations

from typing import Any

__all__ = ["mask"]


def mask(*fields: Any) -> None:
    """Have Airflow mask what is secret in a value, in tracebacks of libraries too."""
    from airflow.sdk.log import mask_secret

    from manycpu.pipeline.spec.credentials import secrets_in

    for secret in secrets_in(fields):
        mask_secret(secret)
