"""LLaVA 1.5 and NeXT for modulm."""
