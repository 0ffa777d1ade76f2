"""Weight updates through shared memory: `SharedWeights` for trainers, and a backend for engines."""

from modulm_weights_shared_memory.segment import SharedWeights

__all__ = ["SharedWeights"]
