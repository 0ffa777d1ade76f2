"""compressed-tensors (LLM Compressor) checkpoints for modulm."""
