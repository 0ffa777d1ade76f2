"""Structured output: constraints on text, compiled in the background, applied to logits."""
