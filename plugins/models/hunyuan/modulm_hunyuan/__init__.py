"""Hunyuan V1 for modulm."""
