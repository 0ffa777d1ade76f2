"""PyTorch checkpoints, read once and then from numpy files beside them."""
