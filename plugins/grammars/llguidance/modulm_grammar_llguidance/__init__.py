"""Structured output through llguidance (https://github.com/guidance-ai/llguidance)."""
