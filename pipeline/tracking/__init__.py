"""Trackers of trainings, such as TensorBoard and MLflow, for those who have them: ``run.tracking``.

They hear of a training while it goes on, by a listener, and at its end all of what was kept of it, so that
one who was away has missed nothing. No tracker ever stops a training or a verb.
"""
