"""GGUF checkpoints (llama.cpp's format) for modulm: weights, configuration, tokenizer."""
