"""The vocabulary: what a run, a target, a state and an error are. Imports nothing of ours."""
