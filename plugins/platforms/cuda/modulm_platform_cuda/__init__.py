"""NVIDIA GPUs as a platform for modulm."""
