"""How passes run: one over the model, recorded ones, ones that are not read yet, and ones that look at a draft's guesses."""
