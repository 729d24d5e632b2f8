"""Sparse decode: attention rows on the host, the few that a step selects on the device.

Imports torch. Knows no requests, models or tiers: tensors, page ids and row numbers only.
"""
