"""Speculative decoding with EAGLE and EAGLE-3 heads."""
