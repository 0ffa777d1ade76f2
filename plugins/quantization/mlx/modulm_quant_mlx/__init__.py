"""MLX checkpoints for modulm."""
