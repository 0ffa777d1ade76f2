"""The worker: builds the model and its caches, and runs plans."""
