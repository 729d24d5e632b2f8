"""Tensor parallelism: one worker process per rank, and the messages between the scheduler's process and the workers."""
