"""InternLM 2 for modulm."""
