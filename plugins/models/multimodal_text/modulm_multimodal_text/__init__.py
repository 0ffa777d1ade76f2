"""Text models inside checkpoints for images and sound, for modulm."""
