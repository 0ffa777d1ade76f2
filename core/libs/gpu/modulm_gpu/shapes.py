"""Which steps are recorded, and how others are padded to them."""

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

#: Mode of the graphs by optimization level.
_BY_LEVEL = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")
#: Levels from which steps may be compiled, and from which they are if nothing else is said.
_MAY_COMPILE, _COMPILES = 2, 3

#: Most tokens of a row of padding.
_PADDING = 16
_MOST = 512


def graph_mode(flags: CompilationConfig) -> str:
    """Which steps are recorded."""
    return flags.cudagraph_mode or _BY_LEVEL[flags.optimization_level]


def compiler(flags: CompilationConfig) -> str | None:
    """The backend by which recorded steps are compiled, or None."""
    level = flags.optimization_level
    wanted = flags.compile_mode or ("NONE" if level < _COMPILES else "any")
    return None if wanted == "NONE" or level < _MAY_COMPILE else flags.compile_backend


@frozen
class RecordedShapes:
    """What is recorded of steps, by their tokens.

    sizes: tokens, ascending. decode, mixed: whether steps of single tokens, and others, are
    recorded whole; pieces: whether what is not is recorded between attention layers. rows: most
    rows of a step. padding: most tokens of a row of padding.
    """

    sizes: tuple[int, ...]
    rows: int
    decode: bool = True
    mixed: bool = False
    pieces: bool = False
    padding: int = _PADDING

    @classmethod
    def of(cls, config: Flags) -> RecordedShapes:
        """As the flags say. Raises ConfigError for sizes that no step can have."""
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
        """The tokens of the rows of each: larger steps before smaller, mixed before decode ones."""
        falling = self.sizes[::-1]
        found = []
        if self.mixed or self.pieces:
            found += [self._filled(np.zeros(0, np.int32), size) for size in falling if size > 1]
        return found + [np.ones(s, np.int32) for s in falling if s <= self.rows]

    def padded(self, counts: np.ndarray) -> np.ndarray:
        """See `RecordedForward.padded`."""
        tokens = int(counts.sum())
        place = bisect_left(self.sizes, tokens)
        if place == len(self.sizes):
            return counts
        size = self.sizes[place]
        if tokens == len(counts) and size <= self.rows:
            return np.ones(size, np.int32)
        if not (self.mixed or self.pieces):
            return counts
        return self._filled(counts, size)

    def _filled(self, counts: np.ndarray, size: int) -> np.ndarray:
        """With rows of padding, up to `size` tokens; with empty ones where rows have to be alike,
        as they are in a step that is recorded whole.
        """
        left = size - int(counts.sum())
        more = [self.padding] * (left // self.padding)
        more += [left % self.padding] if left % self.padding else []
        if self.mixed:
            rest = self.rows + -(-size // self.padding) - len(counts) - len(more)
            more += [0] * max(rest, 0)
        return np.concatenate([counts, np.array(more, np.int32)]).astype(np.int32)


def _sizes(flags: CompilationConfig, rows: int, tokens: int) -> tuple[int, ...]:
    given = flags.cudagraph_capture_sizes
    if given is None:
        most = flags.max_cudagraph_capture_size
        most = min(2 * rows, _MOST) if most is None else most
        given = (1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16))
        given = tuple(size for size in given if size <= most)
    elif min(given, default=1) < 1:
        raise ConfigError("cudagraph_capture_sizes", f"{min(given)} is no number of tokens")
    return tuple(sorted({size for size in given if size <= tokens}))
