"""Random weights for modulm, for measuring without a checkpoint."""
