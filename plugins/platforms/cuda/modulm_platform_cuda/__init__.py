"""NVIDIA GPUs as a platform for modulm, on torch operations."""
