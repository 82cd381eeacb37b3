"""An auth manager for the tests' Airflow: Airflow's simple one, with one user who may not see one DAG."""

from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

__all__ = ["DenyingAuthManager"]


class DenyingAuthManager(SimpleAuthManager):
    """The user ``outsider`` sees every DAG but ``hidden``."""

    def is_authorized_dag(self, *, user: Any, details: Any = None, **how: Any) -> bool:
        denied = user.get_id() == "outsider" and details is not None and details.id == "hidden"
        return not denied and super().is_authorized_dag(user=user, details=details, **how)
