"""AMD GPUs as a platform for modulm."""
