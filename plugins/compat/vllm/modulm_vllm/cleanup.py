"""Cleanup functions of vLLM, and small helpers of `vllm.utils`."""

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
    """Collect garbage; there are no process groups to destroy."""
    gc.collect()


def destroy_model_parallel() -> None:
    """Do nothing: there are no process groups to destroy."""


def destroy_distributed_environment() -> None:
    """Do nothing: there are no process groups to destroy."""


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid4().hex
