"""Follow a job on Kubernetes: its objects, its pods' logs, its time budgets and its state."""
