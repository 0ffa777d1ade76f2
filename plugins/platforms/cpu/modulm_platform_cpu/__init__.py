"""CPUs as a platform for modulm."""
