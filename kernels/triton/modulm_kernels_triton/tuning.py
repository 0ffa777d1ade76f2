"""Tuning of kernels per device: a small table, `tuning.json`.

The table has sections per device, looked up from specific to general: the device's name in torch
("NVIDIA H200"), "cuda 90", "cuda", "default". A section has a list per kernel; the first entry
whose bounds "upto" {size: number} all hold applies. The rest of the entry is passed to the kernel:
its constants, num_warps, num_stages.

`modulm tune` measures entries for a device and keeps them in a table of the same form in the cache
folder, which comes first.

An entry must not depend on the number of rows of a step if that changes the order of a sum
(docs/adr/0120-deterministic-sums-in-gpu-kernels.md).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import torch

from modulm_kernels_triton.device import target

__all__ = ["kept_file", "section", "trying", "tuned"]

log = logging.getLogger("modulm")

Table = dict[str, dict[str, list[dict[str, object]]]]

#: Constants that are tried: kernel -> constants.
_tried: dict[str, Mapping[str, int]] = {}


def kept_file() -> Path:
    """Return the file that `modulm tune` writes."""
    from modulm_kernels_triton.kept import folder

    return folder().parent / "tuning.json"


def section() -> str:
    """Return the name of this device's section."""
    return next(_parts())


@cache
def _table() -> Mapping[str, Mapping[str, list[dict[str, object]]]]:
    text = files("modulm_kernels_triton").joinpath("tuning.json").read_text()
    table: Table = json.loads(text)
    for name, kernels in _kept().items():
        entries = {kernel: [*own, *table.get(name, {}).get(kernel, [])]
                   for kernel, own in kernels.items()}  # fmt: skip
        table[name] = {**table.get(name, {}), **entries}
    return table


def _kept() -> Table:
    """Return what `modulm tune` has measured; a file that cannot be read is reported."""
    file = kept_file()
    try:
        table: Table = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: %s; run modulm tune again", file, error)
        return {}
    return table


@contextmanager
def trying(kernel: str, constants: Mapping[str, int]) -> Iterator[None]:
    """Use these constants for a kernel, whatever its sizes, inside the context."""
    _tried[kernel] = constants
    tuned.cache_clear()
    try:
        yield
    finally:
        del _tried[kernel]
        tuned.cache_clear()


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
    if kernel in _tried:
        return MappingProxyType(dict(_tried[kernel]))
    for part in _parts():
        for entry in _table().get(part, {}).get(kernel, ()):
            bounds = entry.get("upto", {})
            if all(sizes[name] <= most for name, most in bounds.items()):  # type: ignore[attr-defined]
                return MappingProxyType({k: v for k, v in entry.items() if k != "upto"})  # type: ignore[misc]
    raise KeyError(f"tuning.json has no entry for {kernel} with {sizes}")
