"""Which rows run in a step, and with how many tokens."""
