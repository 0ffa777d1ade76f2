"""GLM 4, 4.5 and 4.6 for modulm."""
