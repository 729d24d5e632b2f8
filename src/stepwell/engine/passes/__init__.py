"""What one pass of a model reads and writes: tokens of several requests, and the device pages as tensors. Knows no models."""
