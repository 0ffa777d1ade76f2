"""Weights by broadcast, for modulm: `WeightBroadcaster` for trainers, a backend for engines."""

from modulm_weights_gloo.broadcast import WeightBroadcaster

__all__ = ["WeightBroadcaster"]
