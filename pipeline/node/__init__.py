"""What runs inside every training process: rank, CPU plan, proof of scale, backend, metrics.

Every launcher starts ``python -m manycpu.pipeline.node SCRIPT ARGS`` on every rank; with
``--nproc-per-node=COUNT`` before the script it starts all ranks of this machine. It reports what happens as
events on stdout (:mod:`manycpu.pipeline.spec.events`), a format that readers may rely on:

=========  ==============================================================================
event      fields
=========  ==============================================================================
start      message: what the start waits for, and how long the step before took; without a rank
proof      rank, world_size, host, cpus, threads, backend, round, meeting; of rank 0, if the ranks
           chose the backend: backend_reason
backend    requested, observed, world_size
progress   step, total_steps, epoch, loss, grad_norm, learning_rate, samples_per_second,
           seconds_left (those given)
metrics    values: name -> number
pace       step, step_seconds, samples_per_second, wait_seconds (those known); of each rank
returned   part, parts, text: a part of what a task's function returned, as JSON
result     value, sha256 (of a file) or message: what a notebook's function returned, or why it cannot
warning    message
error      message, kind: the exception or the refusal that ended the rank
finished   meeting, message: all ranks of an earlier meeting have succeeded, so that nothing is run
exit       code (negative: a signal), rank, host; the last event of every rank
=========  ==============================================================================
"""
