"""What is done with a run: one file for each verb."""
