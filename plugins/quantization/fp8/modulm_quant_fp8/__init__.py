"""fp8 for modulm: checkpoints in fp8, and quantization of plain ones at load."""
