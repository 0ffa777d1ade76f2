"""Speculative decoding with Medusa heads."""
