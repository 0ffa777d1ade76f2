"""Fun-ASR for modulm."""
