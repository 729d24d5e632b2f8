"""Who asks, and what they may: keys, tenants, and the door that every request passes."""
