"""The one writer: puts and deletes in groups, and the space they need. One thread at a time.

group_commit  many callers per sync                  writer     what a group of requests does
appender      batches to the end of the log, synced  upkeep     snapshots, the list of segments, how bytes move fastest
reclaim       the next segment to write to           victim     which segment to reclaim, which values to evict
relocate      live values out of an old segment
"""
