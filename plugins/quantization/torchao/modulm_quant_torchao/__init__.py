"""torchao checkpoints for modulm."""
