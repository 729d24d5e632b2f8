"""Values by key over any store, each verified: for caches of others that want a disk or a cluster below them."""
