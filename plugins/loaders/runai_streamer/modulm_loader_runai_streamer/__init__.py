"""Safetensors files, read by several threads ahead of the model."""
