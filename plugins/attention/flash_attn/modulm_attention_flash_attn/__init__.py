"""Attention by the flash-attn library for modulm, where it is installed."""
