"""Weight updates by broadcast: `WeightBroadcaster` for trainers, and a backend for engines."""

from modulm_weights_gloo.broadcast import WeightBroadcaster

__all__ = ["WeightBroadcaster"]
