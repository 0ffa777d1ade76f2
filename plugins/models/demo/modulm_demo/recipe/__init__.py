"""How the checkpoint is made: write text from a seed, train on it, ask unseen questions."""
