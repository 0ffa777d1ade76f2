"""Grok 1 for modulm."""
