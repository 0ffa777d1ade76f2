"""BLOOM for modulm."""
