"""Cause a fault in a supervisor: SUPERVISOR_FAULT is a JSON of {fault, count, log}, as in fault_at.py."""

import json
import os
import sys
from pathlib import Path

if "manycpu.pipeline.adapters.supervisor" in sys.orig_argv and "SUPERVISOR_FAULT" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    from fault_at import Fault

    given = json.loads(os.environ["SUPERVISOR_FAULT"])
    fault = Fault(given["fault"], "", given["count"], given["log"])
    os.register_at_fork(after_in_child=lambda: setattr(fault, "process", os.getpid()))
