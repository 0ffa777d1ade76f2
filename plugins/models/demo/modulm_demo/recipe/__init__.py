"""How the checkpoint is made: generate text from a seed, train, evaluate on unseen questions."""
