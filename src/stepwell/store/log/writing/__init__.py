"""The one writer: puts and deletes in groups, and the space for them. One thread at a time.

writer     what a group of requests does            upkeep     snapshots, the list of segments, the fastest way to move bytes
appender   batches to the end of the log, synced    victim     which segment to reclaim, which values to evict
reclaim    the next segment to write to             relocate   live values from an old segment
"""
