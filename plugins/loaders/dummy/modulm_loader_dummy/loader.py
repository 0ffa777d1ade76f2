"""Random weights in the shapes that the model declares, to measure speed without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from modulm.contracts.loader import StoredTensor, WeightLoader
from modulm.plugins.options import structure

__all__ = ["DummyConfig", "DummyLoader"]

#: Size of the pool: a prime, so that no two rows of a matrix are equal.
_POOL = 4_194_301


@frozen
class DummyConfig:
    """`seed` of the generator; matrices are normal with deviation `std`, vectors are near one."""

    seed: int = 0
    std: float = 0.02


class DummyLoader(WeightLoader):
    """Generates each weight that the model declares. Reads only config.json and the tokenizer.

    Matrices repeat numbers from one pool, each from its own offset: drawing billions would take
    minutes.
    """

    name = "dummy"
    api = 1
    downloads = ()
    Config = DummyConfig

    def __init__(self, path: Path, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, options)
        self.config = structure(options or {}, DummyConfig, "loaders.dummy")
        self._wanted: Mapping[str, StoredTensor] = {}

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        self._wanted = tensors
        return True

    def index(self) -> Mapping[str, StoredTensor]:
        return self._wanted

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.config.seed)
        pool = torch.empty(_POOL).normal_(0.0, self.config.std, generator=generator)
        pools = {torch.float32: pool}
        for name, stored in self._wanted.items():
            yield name, self._invent(stored, generator, pools)

    def _invent(
        self,
        stored: StoredTensor,
        generator: torch.Generator,
        pools: dict[torch.dtype, torch.Tensor],
    ) -> torch.Tensor:
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            return tensor.zero_()
        if tensor.dim() < 2:
            return tensor.normal_(1.0, self.config.std, generator=generator)
        pool = pools.get(tensor.dtype)
        if pool is None:
            pool = pools[tensor.dtype] = pools[torch.float32].to(tensor.dtype)
        start = int(torch.randint(len(pool), (), generator=generator))
        flat, at = tensor.view(-1), 0
        while at < len(flat):
            part = pool[start : start + len(flat) - at]
            flat[at : at + len(part)] = part
            start, at = 0, at + len(part)
        return tensor
