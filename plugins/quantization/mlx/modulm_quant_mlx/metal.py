"""Checkpoints of transformers' `MetalConfig`, written for MLX's kernels.

Only linear layers are quantized, and a group's bias has another name (transformers 5.23,
integrations/metal_quantization.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen, validators

from modulm.contracts.quantization import CheckpointInfo
from modulm_quant_mlx.method import MLX, MLXConfig
from modulm_quantized import CodedMethod, below

__all__ = ["Metal", "MetalConfig"]


@frozen
class MetalConfig(MLXConfig):
    """`quantization_config` of config.json."""

    bits: int = field(default=4, validator=validators.in_((2, 4, 8)))
    modules_to_not_convert: tuple[str, ...] | None = None
    dequantize: bool = False


class Metal(MLX):
    """Codes with a scale and a bias per group of inputs, in linear layers."""

    name = "metal"
    HELD: ClassVar[tuple[str, ...]] = CodedMethod.HELD
    BIASES: ClassVar[str] = "qbiases"
    Config: ClassVar[type] = MetalConfig
    config: MetalConfig

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return CodedMethod.claims.__func__(cls, checkpoint)

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        return checkpoint.quantization or {}

    def skips(self, name: str) -> bool:
        return below(name, self.config.modules_to_not_convert or ("lm_head",))
