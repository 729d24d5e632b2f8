"""Attention to some of the rows: what picks them."""
