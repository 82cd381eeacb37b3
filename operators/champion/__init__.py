"""What the tasks of ``dags/champion.py`` do: one function each, of which the DAG makes tasks."""
