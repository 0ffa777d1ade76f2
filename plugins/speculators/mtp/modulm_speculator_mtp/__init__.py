"""Speculative decoding with the layers that checkpoints bring for it (MTP)."""
