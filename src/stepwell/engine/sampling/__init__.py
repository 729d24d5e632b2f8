"""Which tokens are chosen from a pass's logits: what a request changes in these, how it draws, and what was chosen."""
