"""Qwen 2, 2.5, 3, 3.5 and Next, and MiMo, for modulm."""
