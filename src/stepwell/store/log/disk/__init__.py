"""The machine below the log: file operations, the lock on a directory, aligned memory. Does not know formats or values.

files      all file operations, and memory for direct transfers
locking    one process at a time
"""
