"""Weights from safetensors files, for modulm."""
