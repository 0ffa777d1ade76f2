"""Models of the transformers library for modulm."""
