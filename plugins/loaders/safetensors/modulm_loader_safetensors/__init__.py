"""The safetensors format for modulm."""
