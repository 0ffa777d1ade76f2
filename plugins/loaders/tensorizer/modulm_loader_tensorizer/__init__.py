"""Files of CoreWeave's tensorizer."""
