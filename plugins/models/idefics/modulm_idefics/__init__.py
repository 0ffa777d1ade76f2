"""Idefics 3 and SmolVLM for modulm."""
