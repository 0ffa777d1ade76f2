"""gpt-oss for modulm."""
