"""Attention by FlashInfer: over pages, over latents, and over rows that were picked."""
