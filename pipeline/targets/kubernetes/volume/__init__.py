"""The volume: the claim, and the pods that copy data to and from it."""
