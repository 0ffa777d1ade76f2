"""Text models inside multimodal checkpoints, for modulm."""
