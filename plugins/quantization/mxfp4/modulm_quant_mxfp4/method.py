"""Stacks of experts in MXFP4 (OCP Microscaling Formats (MX) Specification, version 1.0).

A checkpoint holds for each stack [experts, N, K] its `blocks` [experts, N, K / 32, 16], two e2m1
numbers to a byte and the even k in the low nibble, and its `scales` [experts, N, K / 32], an
exponent of 2 plus 127 for 32 successive k. They stay in four bits: packed where the kernels of
this platform know `pack_quantized_experts`, else as they came, to be multiplied with the weight
they stand for. On a plain checkpoint `--quantization mxfp4` rounds linear layers and experts.
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
    """`quantization_config` of config.json; for a plain checkpoint, what is rounded.

    `modules_to_not_convert` are paths of modules, with what lies below them, that the checkpoint
    holds unquantized; `*` stands for a part of a path. `dequantize` unpacks the weights to the
    model's dtype while loading, in four times the memory.
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
    """Reads checkpoints written in MXFP4; all but experts stays as the checkpoint has it.

    Where the model computes in fp32 the kernels, which multiply bf16, are left aside.
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
        if spec.kind != "expert":
            return f"{cls.name} holds experts, not {spec.kind}"
        if spec.inputs % _BLOCK:
            return f"{cls.name} holds inputs in blocks of {_BLOCK}, {spec.inputs} are none"
        return None if spec.dtype in platform.dtypes else f"{platform.name} has no {spec.dtype}"

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
        pack = getattr(self.ops, "pack_quantized_experts", None)
        layer.packed = stack
        if self.config.dequantize:
            layer.packed = self.ops.pack_experts(_whole(stack, spec), len(spec.parts))
        elif pack is not None and spec.dtype != "float32":
            layer.packed = pack(_coded(stack), spec.experts, "e2m1", _BLOCK, len(spec.parts))
        layer.register_parameter("blocks", None)
        layer.register_parameter("scales", None)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        raise UnsupportedError(f"{self.name} holds experts only")

    def experts(self, layer: torch.nn.Module) -> object:
        return layer.packed

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        return _whole(layer.packed, spec).to(getattr(torch, spec.dtype))


def _coded(stack: Blocks) -> Iterator[tuple[Tensor, Tensor, None]]:
    """Codes and scales of each expert, as kernels take them: for twice the numbers, half of their
    scales. Those below 2^-125 count as 2^-125."""
    for blocks, scales in zip(stack.blocks, stack.scales, strict=True):
        yield nibbles(blocks.flatten(1)), scales.clamp(min=2) - 1, None


def _whole(stack: Any, spec: LinearSpec) -> Tensor:
    """[experts, N, K]"""
    return torch.stack([stack[expert] for expert in range(spec.experts)])


def _below(path: str) -> re.Pattern[str]:
    """Matches the name of a module at `path` or below it."""
    parts = (re.escape(part) for part in path.split("*"))
    return re.compile(r"[^.]*".join(parts) + r"(\.|$)")


class GptOssMxfp4(Mxfp4):
    """A name that vLLM has for it."""

    name = "gpt_oss_mxfp4"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None
