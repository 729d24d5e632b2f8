"""What is on disk: how batches, tombstones, the index and the list of segments are written as bytes and read back.

batch      batches as bytes: all that a segment holds      scan           batches out of a segment, damage stepped over
snapshot   the index as one file                           segment_list   which segments there must be, and their names
superblock what a directory must be opened with
"""
