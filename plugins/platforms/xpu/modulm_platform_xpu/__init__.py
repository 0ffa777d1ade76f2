"""Intel GPUs as a platform for modulm."""
