"""NVIDIA Parakeet for modulm."""
