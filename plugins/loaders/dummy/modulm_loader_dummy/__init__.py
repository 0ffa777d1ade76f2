"""Random weights, to measure speed without a checkpoint."""
