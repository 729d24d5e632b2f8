"""Sparse decode: keeps the few rows that a step attends to on the device, and all others on the host.

Imports torch. Knows no requests, models or tiers: tensors, page ids and row numbers only.
"""
