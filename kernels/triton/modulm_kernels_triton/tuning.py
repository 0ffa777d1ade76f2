"""Tuning of kernels per device: a small table, `tuning.json`.

The table has sections per device, looked up from specific to general: the device's name in torch
("NVIDIA H200"), "cuda 90", "cuda", "default". A section has a list per kernel; the first entry
whose bounds "upto" {size: number} all hold applies. The rest of the entry is passed to the kernel:
its constants, num_warps, num_stages.

An entry must not depend on the number of rows of a step if that changes the order of a sum
(docs/adr/0120-deterministic-sums-in-gpu-kernels.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

import torch

from modulm_kernels_triton.device import target

__all__ = ["tuned"]


@cache
def _table() -> Mapping[str, Mapping[str, list[dict[str, object]]]]:
    text = files("modulm_kernels_triton").joinpath("tuning.json").read_text()
    table: dict[str, dict[str, list[dict[str, object]]]] = json.loads(text)
    return table


def _parts() -> Iterator[str]:
    backend, architecture = target()
    if backend in ("cuda", "hip") and torch.cuda.is_available():
        yield torch.cuda.get_device_name()
    yield f"{backend} {architecture}"
    yield backend
    yield "default"


@cache
def tuned(kernel: str, **sizes: int) -> Mapping[str, int]:
    """Return the constants of a kernel for a problem of these sizes on this device.

    Raises KeyError for a kernel or sizes that the table lacks.
    """
    for part in _parts():
        for entry in _table().get(part, {}).get(kernel, ()):
            bounds = entry.get("upto", {})
            if all(sizes[name] <= most for name, most in bounds.items()):  # type: ignore[attr-defined]
                return MappingProxyType({k: v for k, v in entry.items() if k != "upto"})  # type: ignore[misc]
    raise KeyError(f"tuning.json has no entry for {kernel} with {sizes}")
