"""EXAONE 4 for modulm."""
