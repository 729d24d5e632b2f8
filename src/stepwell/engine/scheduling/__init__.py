"""What a step decides: who may ask for what, who computes in the next pass, which passes run, and what comes of them."""
