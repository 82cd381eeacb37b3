"""Send parameters, metrics and the end of a run to trackers, such as TensorBoard and MLflow: run.tracking.

A listener sends points while the training runs. The end of the run sends everything that its report has kept,
so a tracker that did not answer for a while misses nothing. No tracker ever stops a training or a verb.
"""
