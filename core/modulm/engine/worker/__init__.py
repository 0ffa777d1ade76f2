"""Builds the model and its caches, and runs plans on them."""
