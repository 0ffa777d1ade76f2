"""Stacks of experts in MXFP4 (OCP Microscaling Formats (MX) Specification, version 1.0).

For each stack [experts, N, K], a checkpoint holds `blocks` [experts, N, K / 32, 16], two e2m1
numbers per byte with the even k in the low half, and `scales` [experts, N, K / 32], exponents of 2
plus 127. They stay in 4 bits: packed if the platform's kernels have `pack_quantized_experts`,
otherwise as stored and dequantized for each product. On a plain checkpoint, `--quantization mxfp4`
quantizes linear layers and experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import UnsupportedError
from modulm_quantized import ReadOrRound, ReadOrRoundConfig, nibbles

__all__ = ["Blocks", "GptOssMxfp4", "Mxfp4", "Mxfp4Config"]

_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


@frozen
class Mxfp4Config(ReadOrRoundConfig):
    """`quantization_config` of config.json; for a plain checkpoint, the layers to quantize.

    `modules_to_not_convert`: paths of modules that the checkpoint holds unquantized, including
    their submodules; `*` matches a part of a path. `dequantize`: convert weights to the model's
    dtype while loading, using four times the memory.
    """

    modules_to_not_convert: tuple[str, ...] | None = None
    dequantize: bool = False


@frozen(eq=False)
class Blocks:
    """A stack as stored; `stack[e]` is the weight [N, K] of one expert in `dtype`."""

    blocks: Tensor
    scales: Tensor
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        values = torch.tensor(_VALUES, device=self.blocks.device)
        codes = self.blocks[expert].int()
        pairs = torch.stack([values[codes & 15], values[codes >> 4]], dim=-1)
        exponents = self.scales[expert].int() - 127
        return torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(1).to(self.dtype)


class Mxfp4(ReadOrRound):
    """Reads MXFP4 checkpoints, in which only experts are quantized.

    The kernels multiply bf16, so they are not used for models in fp32.
    """

    name = "mxfp4"
    api = 2
    Config: ClassVar[type] = Mxfp4Config
    config: Mxfp4Config

    ROUNDS_TO = "mxfp4"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        method = (checkpoint.quantization or {}).get("quant_method")
        return "config.json says quant_method mxfp4" if method == cls.name else None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.kind is not LinearKind.EXPERT:
            return f"{cls.name} supports experts, not {spec.kind}"
        if spec.inputs % _BLOCK:
            return f"{cls.name} needs inputs in blocks of {_BLOCK}, not {spec.inputs}"
        return (
            None
            if spec.dtype in platform.dtypes
            else f"{platform.name} does not support {spec.dtype}"
        )

    def skips(self, name: str) -> bool:
        paths = self.config.modules_to_not_convert or ()
        return any(_below(path).match(name) for path in paths)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        scales = ParamSpec((OUTPUTS, INPUTS.packed(_BLOCK)), "uint8")
        blocks = ParamSpec((OUTPUTS, INPUTS.packed(_BLOCK), fixed(_BLOCK // 2)), "uint8")
        return {"blocks": blocks, "scales": scales}

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        blocks, scales = layer.get_parameter("blocks"), layer.get_parameter("scales")
        stack = Blocks(blocks.detach(), scales.detach(), getattr(torch, spec.dtype))
        pack = self.ops.find("pack_quantized_experts")
        layer.packed = stack
        if self.config.dequantize:
            layer.packed = self.ops.pack_experts(_whole(stack, spec), len(spec.parts))
        elif pack is not None and spec.dtype != "float32":
            layer.packed = pack(_coded(stack), spec.experts, "e2m1", _BLOCK, len(spec.parts))
        layer.register_parameter("blocks", None)
        layer.register_parameter("scales", None)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        raise UnsupportedError(f"{self.name} supports experts only")

    def experts(self, layer: torch.nn.Module) -> object:
        return layer.packed

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        return _whole(layer.packed, spec).to(getattr(torch, spec.dtype))


def _coded(stack: Blocks) -> Iterator[tuple[Tensor, Tensor, None]]:
    """Yield codes and scales of each expert as the kernels take them: doubled values with halved
    scales. Scales below 2^-125 become 2^-125.
    """
    for blocks, scales in zip(stack.blocks, stack.scales, strict=True):
        yield nibbles(blocks.flatten(1)), scales.clamp(min=2) - 1, None


def _whole(stack: Any, spec: LinearSpec) -> Tensor:
    """Dequantize a stack to [experts, N, K]."""
    return torch.stack([stack[expert] for expert in range(spec.experts)])


def _below(path: str) -> re.Pattern[str]:
    """Return a pattern for the names of the module at `path` and of its submodules."""
    parts = (re.escape(part) for part in path.split("*"))
    return re.compile(r"[^.]*".join(parts) + r"(\.|$)")


class GptOssMxfp4(Mxfp4):
    """vLLM's name for the same method."""

    name = "gpt_oss_mxfp4"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None
