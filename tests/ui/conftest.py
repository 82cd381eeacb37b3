from standalone import airflow

__all__ = ["airflow"]
