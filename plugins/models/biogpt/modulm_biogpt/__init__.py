"""BioGPT for modulm."""
