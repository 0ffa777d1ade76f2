"""Structured output: constraints on text, compiled beside the steps, applied to the logits."""
