"""A store below the host tier: what brings up (prefetch), what takes down (backup), and what is believed to be stored."""
