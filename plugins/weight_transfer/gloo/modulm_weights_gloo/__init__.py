"""Weight updates by broadcast: `WeightBroadcaster` for trainers, and a backend for engines."""

from modulm_weight_transfer.broadcast import WeightBroadcaster

__all__ = ["WeightBroadcaster"]
