"""Speculative decoding with DFlash and DSpark heads, which draft a block of tokens at once."""
