"""Following a job: its objects, its pods' logs, its time budgets, and what its state is."""
