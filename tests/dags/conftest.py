"""Airflow's database is there for every test of this folder."""

import pytest


@pytest.fixture(autouse=True)
def _airflow(database: None) -> None: ...
