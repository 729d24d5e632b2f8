"""How passes run: one over the model, captured CUDA graphs, passes in flight, and passes that verify a draft's guesses."""
