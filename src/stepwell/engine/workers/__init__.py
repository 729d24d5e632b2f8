"""Ranks as processes: what the scheduler's process tells workers, what a worker does with it, and what is told back."""
