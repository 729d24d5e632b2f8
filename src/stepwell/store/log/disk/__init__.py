"""The machine below the log: file operations, the lock on a directory, aligned memory. Knows no format and no values.

files      every file operation there is, and memory for direct transfers
locking    one process at a time
"""
