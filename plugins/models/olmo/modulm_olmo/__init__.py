"""OLMo 1, 2 and 3 for modulm."""
