"""NVFP4 checkpoints for modulm."""
