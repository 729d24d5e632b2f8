"""Who asks, and what they may: keys, tenants, and the admission that every request passes."""
