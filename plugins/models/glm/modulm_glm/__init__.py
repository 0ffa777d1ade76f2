"""GLM 4 for modulm."""
