"""Compiled and captured graphs: accepted so that scripts run, and without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, no_effect

__all__ = ["CompilationConfig"]

_NONE = no_effect("no graphs are compiled: kernels come compiled, for --enforce-eager see there")


@frozen(kw_only=True, field_transformer=equip)
class CompilationConfig:
    """Compiled and captured graphs: accepted so that scripts run, and without effect."""

    TITLE: ClassVar[str] = "CompilationConfig"
    TABLE: ClassVar[str | None] = None

    optimization_level: int = flag(
        2, "How much is compiled: -O0 to -O3.", least=0, most=3, aliases=("-O",), state=_NONE
    )
    compilation_config: Mapping[str, Any] = flag(
        {}, "What is compiled, as JSON.", aliases=("-cc",), state=_NONE
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = flag(
        None, "Batch sizes of captured graphs.", state=_NONE
    )
    max_cudagraph_capture_size: int | None = flag(
        None, "Largest batch of a captured graph.", least=0, state=_NONE
    )
    cuda_graph_sizes: tuple[int, ...] = flag(
        (), "Batch sizes of captured graphs.", deprecated="use --cudagraph-capture-sizes",
        state=_NONE,
    )  # fmt: skip
    max_seq_len_to_capture: int = flag(
        8192, "Longest sequence of a captured graph.", unit="tokens", least=1, state=_NONE
    )
