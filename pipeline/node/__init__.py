"""What runs inside every training process: rank, CPU plan, proof of scale, backend, metrics.

``python -m manycpu.pipeline.node SCRIPT ARGS`` is what every launcher starts on every rank; with
``--nproc-per-node=COUNT`` before the script it starts all ranks of this machine by itself. It tells what
happens by events on stdout (:mod:`manycpu.pipeline.spec.events`), which readers may rely on:

=========  ==============================================================================
event      fields
=========  ==============================================================================
start      message: what the start waits for, and how long the last thing took; of no rank, once
proof      rank, world_size, host, cpus, threads, backend, round; of rank 0, where the ranks chose
           the backend: backend_reason
backend    asked, observed, world_size
progress   step, total_steps, epoch, loss, grad_norm, learning_rate, samples_per_second,
           seconds_left (those given)
metrics    values: name -> number
warning    message
error      message, kind: what the script, or the node itself, died of
finished   meeting, message: an earlier meeting of which all ranks ended well, so that nothing is run
exit       code (negative: a signal), rank, host; the last event of every rank
=========  ==============================================================================
"""
