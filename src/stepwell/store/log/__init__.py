"""The embedded disk store: values in append-only segments under one directory, for one process at a time.

Each line imports only from lines below it:

inspect    a directory examined from outside: figures, checks, repair
opening    options -> an open store
store      the six verbs, stat, clear, group commit
reader     values -> the caller's buffers
recovery/  how the log opens: recover, check, repair, stat
writing/   how values are written and space is found: append, reclaim, relocate, upkeep
state/     what an open log knows: index, segments, stale values, budget
format/    what is on disk: batches, tombstones, snapshot, list of segments, superblock
disk/      how bytes move: every file operation, aligned memory, the lock on the directory
"""
