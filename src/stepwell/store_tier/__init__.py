"""A store below the host tier: fetching (prefetch), storing (backup), and what the store is believed to have."""
