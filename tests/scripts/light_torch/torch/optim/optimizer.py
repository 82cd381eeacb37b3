"""Optimizers, which never make a step."""


class Optimizer:
    """Its name."""


def register_optimizer_step_post_hook(hook):
    """Hear of no step."""
