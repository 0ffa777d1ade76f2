"""Random weights for modulm, to measure without a checkpoint."""
