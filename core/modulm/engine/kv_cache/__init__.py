"""KV cache: block pools, block tables per row, prefix index, sizes."""
