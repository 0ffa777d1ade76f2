"""Weight updates out of a trainer's GPU memory: `IpcWeights` for trainers, and a backend."""

from modulm_weights_ipc.handles import IpcWeights

__all__ = ["IpcWeights"]
