"""Attention with the flash-attn library for modulm, if it is installed."""
