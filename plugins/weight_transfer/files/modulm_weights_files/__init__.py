"""Weight updates from safetensors files."""
