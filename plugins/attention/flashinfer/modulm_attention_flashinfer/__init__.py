"""Attention by the FlashInfer library for modulm, where it is installed."""
