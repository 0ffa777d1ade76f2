"""NVIDIA ModelOpt checkpoints for modulm."""
