"""StarCoder 2 for modulm."""
