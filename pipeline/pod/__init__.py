"""What runs inside helper pods, beside the volume, and the protocol in which the worker talks with it."""
