"""Kueue, which decides when jobs of a queue may begin: its labels and its objects."""

from typing import Final

from manycpu.pipeline.spec.job_kinds import ApiResource

__all__ = ["JOB_UID", "LOCAL_QUEUE", "PRIORITY", "QUEUE", "VISIBILITY", "WORKLOAD"]

_GROUP: Final = "kueue.x-k8s.io"
QUEUE: Final = f"{_GROUP}/queue-name"
"""Label of a job with the queue that admits it."""
PRIORITY: Final = f"{_GROUP}/priority-class"
"""Label of a job with its WorkloadPriorityClass."""
JOB_UID: Final = f"{_GROUP}/job-uid"
"""Label of a workload with the job that it stands for."""
# Kueue drops its versions after a few releases: what a cluster prefers is asked.
WORKLOAD: Final = ApiResource("Workload", _GROUP, "", "workloads")
LOCAL_QUEUE: Final = ApiResource("LocalQueue", _GROUP, "", "localqueues")
VISIBILITY: Final = ApiResource("PendingWorkloadsSummary", f"visibility.{_GROUP}", "", "localqueues")
"""Who waits in a queue, in order: each queue has it as ``pendingworkloads``."""
