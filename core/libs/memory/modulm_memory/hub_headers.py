"""Checkpoints that are elsewhere, without their weights: small files, and headers of weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.loading.sources import fetch

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["headers_only"]


@contextmanager
def headers_only(config: EngineConfig) -> Iterator[EngineConfig]:
    """Yield a configuration whose `--model` can be opened without downloading weights.

    For a name that a source of checkpoints knows and whose weights are not in the local cache, this
    is a temporary folder with the small files, and safetensors files that have a header but no data
    (they are sparse). Raises CheckpointError if the source cannot be reached or the weights have
    another format.
    """
    name = config.model.model
    if Path(name).expanduser().exists():
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="modulm-headers-") as folder:
        path = fetch(name, config, headers_in=Path(folder))
        if path is None or not path.is_relative_to(folder):
            yield config
        else:
            yield config.with_parts({"model": folder, "served_model_name": (name,)})
