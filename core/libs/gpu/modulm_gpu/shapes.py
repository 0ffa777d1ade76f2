"""Which step shapes are recorded, and how steps are padded to them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from modulm.contracts.config.model import ModelConfig
from modulm.contracts.config.scheduler import SchedulerConfig
from modulm.errors import ConfigError
from modulm_gpu.flags import CompilationConfig

if TYPE_CHECKING:
    from modulm.contracts.platform import Flags

__all__ = ["RecordedShapes", "compiler", "graph_mode"]

#: Default graph mode by optimization level.
_BY_LEVEL = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")
#: Level from which compilation is available, and from which it is the default.
_MAY_COMPILE, _COMPILES = 2, 3

#: Maximum tokens of a padding row.
_PADDING = 16
_MOST = 512


def graph_mode(flags: CompilationConfig) -> str:
    """The mode that decides which steps are recorded."""
    return flags.cudagraph_mode or _BY_LEVEL[flags.optimization_level]


def compiler(flags: CompilationConfig) -> str | None:
    """The backend that compiles recorded steps, or None."""
    level = flags.optimization_level
    mode = flags.compile_mode or ("NONE" if level < _COMPILES else "any")
    return None if mode == "NONE" or level < _MAY_COMPILE else flags.compile_backend


@frozen
class RecordedShapes:
    """The recorded step shapes, in tokens.

    sizes: tokens, ascending. decode, mixed: whether steps of single tokens, and other steps, are
    recorded in full. pieces: whether the remaining ones are recorded piecewise. rows: maximum rows
    of a step. padding: maximum tokens of a padding row.
    """

    sizes: tuple[int, ...]
    rows: int
    decode: bool = True
    mixed: bool = False
    pieces: bool = False
    padding: int = _PADDING

    @classmethod
    def of(cls, config: Flags) -> RecordedShapes:
        """Derive the shapes from the flags. Raises ConfigError for impossible sizes."""
        flags, scheduler = config.group(CompilationConfig), config.group(SchedulerConfig)
        mode = graph_mode(flags)
        rows, tokens = scheduler.max_num_seqs or 1, scheduler.max_num_batched_tokens
        return cls(
            sizes=() if mode == "NONE" else _sizes(flags, rows, tokens or rows),
            rows=rows,
            decode=mode.startswith("FULL"),
            mixed=mode == "FULL",
            pieces=mode.endswith("PIECEWISE"),
            padding=min(_PADDING, config.group(ModelConfig).max_model_len or _PADDING),
        )

    @property
    def steps(self) -> list[np.ndarray]:
        """Tokens per row of each recorded step: larger before smaller, mixed before decode
        steps.
        """
        falling = self.sizes[::-1]
        shapes = []
        if self.mixed or self.pieces:
            shapes += [self._filled(np.zeros(0, np.int32), size) for size in falling if size > 1]
        return shapes + [np.ones(s, np.int32) for s in falling if s <= self.rows]

    def padded(self, counts: np.ndarray) -> np.ndarray:
        """See `RecordedForward.padded`."""
        tokens = int(counts.sum())
        index = bisect_left(self.sizes, tokens)
        if index == len(self.sizes):
            return counts
        size = self.sizes[index]
        if tokens == len(counts) and size <= self.rows:
            return np.ones(size, np.int32)
        if not (self.mixed or self.pieces):
            return counts
        return self._filled(counts, size)

    def _filled(self, counts: np.ndarray, size: int) -> np.ndarray:
        """Add padding rows up to `size` tokens.

        Full recordings of mixed steps also need empty rows, because their row counts must be equal.
        """
        left = size - int(counts.sum())
        more = [self.padding] * (left // self.padding)
        more += [left % self.padding] if left % self.padding else []
        if self.mixed:
            rest = self.rows + -(-size // self.padding) - len(counts) - len(more)
            more += [0] * max(rest, 0)
        return np.concatenate([counts, np.array(more, np.int32)]).astype(np.int32)


def _sizes(flags: CompilationConfig, rows: int, tokens: int) -> tuple[int, ...]:
    sizes = flags.cudagraph_capture_sizes
    if sizes is None:
        most = flags.max_cudagraph_capture_size
        most = min(2 * rows, _MOST) if most is None else most
        sizes = (1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16))
        sizes = tuple(size for size in sizes if size <= most)
    elif min(sizes, default=1) < 1:
        raise ConfigError(
            "cudagraph_capture_sizes", f"{min(sizes)} is not a valid number of tokens"
        )
    return tuple(sorted({size for size in sizes if size <= tokens}))
