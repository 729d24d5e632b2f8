"""Two memory tiers under one tree: what requests hold, restore, publish and save, and what is evicted. Does not know stores."""
