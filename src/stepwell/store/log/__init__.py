"""The embedded disk store: values in append-only segments under one directory, for one process at a time.

opening    options -> an open store          store      the six verbs, stat, clear
format     batches as bytes                  scan       batches out of a segment, damage stepped over
index      where every value is, how warm    snapshot   the index as one file
recovery   a directory -> an index           segments   the files of the log
appending  batches -> disk, synced           commit     one writer at a time, many callers per sync
writing    what a group of requests does     reclaim    room for more
reading    values -> the caller's buffers    check      every byte verified, damage dropped
disk       every file operation there is     probe      which way of moving bytes is fastest here
locking    one process at a time             sealed     which segments there must be
marks      deletes and clears                ghosts     bytes that a delete must hide
"""
