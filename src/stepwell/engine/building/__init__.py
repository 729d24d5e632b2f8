"""Builds a running engine from settings: resolves them for this machine, then builds it on one rank or on several."""
