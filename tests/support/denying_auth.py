"""An auth manager for the tests' Airflow: SimpleAuthManager, with a user that has no access to one DAG."""

from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager


class DenyingAuthManager(SimpleAuthManager):
    """Auth manager whose user ``outsider`` has access to every DAG except ``hidden``."""

    def is_authorized_dag(self, *, user: Any, details: Any = None, **how: Any) -> bool:
        denied = user.get_id() == "outsider" and details is not None and details.id == "hidden"
        return not denied and super().is_authorized_dag(user=user, details=details, **how)
