"""DiffLlama for modulm."""
