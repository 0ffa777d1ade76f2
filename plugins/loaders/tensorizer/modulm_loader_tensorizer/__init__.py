"""Load files of CoreWeave's tensorizer."""
