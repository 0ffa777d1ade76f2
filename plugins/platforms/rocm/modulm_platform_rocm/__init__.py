"""AMD's GPUs as a platform for modulm."""
