"""The verbs of a run, one file per verb."""
