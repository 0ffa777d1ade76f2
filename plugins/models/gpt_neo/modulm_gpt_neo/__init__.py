"""GPT-Neo for modulm."""
