"""MXFP8 checkpoints for modulm."""
