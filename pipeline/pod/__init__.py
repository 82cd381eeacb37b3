"""The program inside helper pods, beside the volume, and the protocol between it and the worker."""
