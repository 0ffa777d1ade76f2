"""Weights in e4m3 (Micikevicius et al., arXiv 2209.05433), as published or quantized at load.

A published layer has `weight` and `weight_scale`, one per fused part or ("fbgemm_fp8") per output,
or `weight_scale_inv`, one per block of outputs and inputs (DeepSeek-V3, arXiv 2412.19437, section
3.3). A plain checkpoint is quantized while loading, with a
scale per output; its experts are not quantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm_quantized import (
    SCHEMES,
    CodedMethod,
    Codes,
    StoredAs,
    below,
    block_columns,
    block_grid,
    per_row,
    round_weight,
)

__all__ = ["FP8", "FP8Config", "FbgemmFP8", "PtpcFP8"]

_OF_EXPERT = re.compile(r"\.experts\.")
_NEEDLESS = re.compile(r"\.(input_scale(_ub)?|activation_scale|[kv]_scale)$")


@frozen
class FP8Config:
    """`quantization_config` of config.json; empty for a plain checkpoint.

    `activation_scheme`: "static" if layers have the scale of their inputs. If the kernels multiply
    fp8, inputs are quantized with it, otherwise with a scale per token, or in blocks. Bounds of
    activations are ignored.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = ""
    fmt: str = field(default="e4m3", validator=validators.in_(("e4m3", "float8_e4m3fn")))
    activation_scheme: str = field(
        default="dynamic", validator=validators.in_(("dynamic", "static"))
    )
    weight_block_size: tuple[int, ...] | None = None
    ignored_layers: tuple[str, ...] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        block = self.weight_block_size
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise ValueError(
                f"weight_block_size: must be two numbers, outputs and inputs, not {block}"
            )

    @property
    def static(self) -> bool:
        """Whether the checkpoint has the scales of inputs."""
        return self.activation_scheme == "static" and self.weight_block_size is None


class FP8(CodedMethod):
    """8-bit floats: one byte per weight, with an exponent."""

    name = "fp8"
    Config: ClassVar[type] = FP8Config
    config: FP8Config
    LISTS: ClassVar = {"ignored_layers": below, "modules_to_not_convert": below}

    @property
    def stored(self) -> bool:
        """Whether the checkpoint holds fp8 weights."""
        return bool(self.config.quant_method)

    def skips(self, name: str) -> bool:
        if self.stored and name.rpartition(".")[2] == "lm_head":
            return True
        listed = (self.config.ignored_layers or ()) + (self.config.modules_to_not_convert or ())
        return below(name, listed)

    def scheme(self, spec: LinearSpec) -> StoredAs | None:
        if not self.stored:
            return None
        block = self.config.weight_block_size
        group = 0 if block is None else block_columns(spec, block[1])
        return StoredAs(f"e4m3, a scale per {self.scope}", "fp8", 8, group)

    @property
    def scope(self) -> str:
        """What shares a scale."""
        block = self.config.weight_block_size
        return "tensor" if block is None else "block of {} outputs and {} inputs".format(*block)

    def rename(self, name: str) -> str | None:
        if self.config.static and name.endswith(".input_scale"):
            # Only linear layers whose inputs are quantized have it.
            example = LinearSpec("", 1, (1,), False, "bfloat16")
            if self.activations(example) == "fp8_static" and not _OF_EXPERT.search(name):
                return name
        return None if self.stored and _NEEDLESS.search(name) else name

    def designed_activations(self, spec: LinearSpec) -> str:
        if self.config.weight_block_size is not None:
            return "fp8"
        return "fp8_static" if self.config.static else "fp8_token"

    def input_scale(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Tensor | None:
        return stored["input"].max() if "input" in stored else None

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        if not self.stored:
            return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype)}
        params = {"weight": ParamSpec((OUTPUTS, INPUTS), "float8_e4m3fn"), "scale": self._scale()}
        if self.activations(spec) == "fp8_static":
            params["input"] = ParamSpec((PARTS,), "float32", "input_scale", optional=True)
        return params

    def _scale(self) -> ParamSpec:
        block = self.config.weight_block_size
        if block is None:
            return ParamSpec((PARTS,), "float32", "weight_scale")
        axes = (OUTPUTS.blocks(block[0]), INPUTS.blocks(block[1]))
        return ParamSpec(axes, "float32", "weight_scale_inv")

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        if not self.stored:
            return (round_weight(stored["weight"], SCHEMES["fp8"]),)
        return (Codes(stored["weight"], self._grid(stored["scale"], spec)),)

    def _grid(self, scale: Tensor, spec: LinearSpec) -> Tensor:
        """Return the stored scales as [N, groups]."""
        block = self.config.weight_block_size
        return per_row(scale, spec) if block is None else block_grid(scale, spec, *block)


class FbgemmFP8(FP8):
    """FBGEMM checkpoints, with a scale per output."""

    name = "fbgemm_fp8"
    scope = "output"

    def _scale(self) -> ParamSpec:
        return ParamSpec((OUTPUTS, fixed(1)), "float32", "weight_scale")

    def _grid(self, scale: Tensor, spec: LinearSpec) -> Tensor:
        return scale


class PtpcFP8(FbgemmFP8):
    """vLLM's name for a scale per output and per-token activation scales."""

    name = "ptpc_fp8"
