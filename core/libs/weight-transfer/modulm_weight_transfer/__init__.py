"""Updates of the weights of a running engine, for modulm."""
