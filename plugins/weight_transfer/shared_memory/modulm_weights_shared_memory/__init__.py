"""Weights through shared memory, for modulm: `SharedWeights` for trainers, and a backend."""

from modulm_weights_shared_memory.segment import SharedWeights

__all__ = ["SharedWeights"]
