"""What is on disk: how batches, tombstones, the index and the list of segments are written as bytes and read back.

batch      batches as bytes: all that a segment holds      scan           batches from a segment, skipping damage
snapshot   the index as one file                           segment_list   which segments must exist, and their names
superblock the settings that a directory must be opened with
"""
