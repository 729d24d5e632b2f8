"""Sparse decode: what picks the rows that a step looks at, and these few rows on the device when all others are on the host.

Imports torch. Knows no requests, models or tiers: tensors, page ids and row numbers only.
"""
