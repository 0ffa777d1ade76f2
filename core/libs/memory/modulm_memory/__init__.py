"""What a model needs: bytes of its weights, caches and steps, before it is loaded."""
