"""What an open log knows in memory: its values, its segments, and how much of its budget is left. Decides nothing.

index      what is known of each value, by key       segments   the segment files, and how many may exist
stale      bytes of values that moved or went        log_state  all of these together, for the parts of one open log
"""
