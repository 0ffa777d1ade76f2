"""What scripts call when they are done with an engine, and other small things of `vllm.utils`."""

from __future__ import annotations

import gc
from uuid import uuid4

__all__ = [
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "random_uuid",
]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give back what nobody refers to any more; there are no process groups to end."""
    gc.collect()


def destroy_model_parallel() -> None:
    """There are no process groups to end."""


def destroy_distributed_environment() -> None:
    """There are no process groups to end."""


def random_uuid() -> str:
    """32 hexadecimal digits."""
    return uuid4().hex
