"""The vocabulary: what a run, a target, a state and an error are. Imports no other package of manycpu."""
