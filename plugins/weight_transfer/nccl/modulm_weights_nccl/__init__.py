"""Weight updates by broadcast between GPUs: a backend for engines. Trainers use
`WeightBroadcaster(..., collective="nccl")`.
"""

from modulm_weight_transfer.broadcast import WeightBroadcaster

__all__ = ["WeightBroadcaster"]
