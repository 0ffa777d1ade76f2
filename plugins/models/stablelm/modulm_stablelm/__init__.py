"""StableLM for modulm."""
