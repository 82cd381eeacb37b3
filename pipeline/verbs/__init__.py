"""The verbs of a run, one file for each."""
