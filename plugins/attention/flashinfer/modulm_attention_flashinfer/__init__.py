"""Attention with the FlashInfer library for modulm, if it is installed."""
