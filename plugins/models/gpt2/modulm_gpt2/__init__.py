"""GPT-2 for modulm."""
