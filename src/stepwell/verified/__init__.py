"""Verified values by key over any store: for other caches that want a disk or a cluster below them."""
