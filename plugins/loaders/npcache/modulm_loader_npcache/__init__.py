"""PyTorch checkpoints, cached as numpy files beside them."""
