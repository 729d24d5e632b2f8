"""What an open log knows in memory: its values, its segments, and how much of its budget is left. Decides nothing.

columns    one row per value, as NumPy columns       index      keys to rows, and when each was last used
segments   the segment files and their descriptors   stale      bytes of values that moved or were evicted
budget     how many segments may exist               log_state  all of these together, for the parts of one open log
"""
