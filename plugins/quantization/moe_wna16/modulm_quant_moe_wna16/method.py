"""GPTQ and AWQ checkpoints of mixtures of experts, with `--quantization moe_wna16`.

GPTQ: `qweight` [K * bits / 32, N] and `qzeros` [groups, N * bits / 32], zero points minus one. AWQ:
`qweight` [K, N / 8] and `qzeros` [groups, N / 8], words with columns 0, 2, 4, 6, 1, 3, 5, 7 from
the lowest bits up. Both: `scales` [groups, N]. Sources: QuantLinear of AutoGPTQ 0.7 and
WQLinear_GEMM of AutoAWQ 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import ConfigError
from modulm_quantized import (
    CodedMethod,
    Codes,
    StoredAs,
    below,
    packed_axis,
    sorted_by_group,
    unpack_words,
)

__all__ = ["MoeWNA16", "MoeWNA16Config"]

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@frozen
class MoeWNA16Config:
    """`quantization_config` of config.json, as GPTQ or AWQ write it."""

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = field(default="gptq", validator=validators.in_(("gptq", "awq")))
    bits: int = field(default=4, validator=validators.in_((4, 8)))
    group_size: int = 128
    desc_act: bool = False
    lm_head: bool = False
    checkpoint_format: str = field(default="gptq", validator=validators.in_(("gptq", "gptq_v2")))
    version: str = field(default="gemm", converter=str.lower, validator=validators.in_(("gemm",)))
    modules_to_not_convert: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if self.quant_method == "awq" and self.bits != 4:
            raise ValueError(f"bits: must be 4 for awq, not {self.bits}")


class MoeWNA16(CodedMethod):
    """4-bit or 8-bit codes with a zero point per group; selected only by name."""

    name = "moe_wna16"
    Config: ClassVar[type] = MoeWNA16Config
    config: MoeWNA16Config
    LISTS: ClassVar = {"modules_to_not_convert": below}

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None

    def skips(self, name: str) -> bool:
        if name.rpartition(".")[2] == "lm_head" and not self.config.lm_head:
            return True
        return below(name, self.config.modules_to_not_convert or ())

    def scheme(self, spec: LinearSpec) -> StoredAs:
        config = self.config
        return StoredAs.integers(
            config.bits, config.group_size, zeros=True, ordered=config.desc_act
        )

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        bits, total = self.config.bits, spec.input_shard.total
        size = self.config.group_size if self.config.group_size > 0 else total
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.group_size",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        groups = fixed(1) if size == total else INPUTS.blocks(size)
        word_axis = packed_axis(OUTPUTS, bits)
        rest = {
            "qzeros": ParamSpec((groups, word_axis), "int32"),
            "scales": ParamSpec((groups, OUTPUTS), "float16"),
        }
        if self.config.quant_method == "awq":
            return {"qweight": ParamSpec((INPUTS, word_axis), "int32"), **rest}
        index = ParamSpec((PARTS, INPUTS), "int32", optional=True)
        packed = ParamSpec((packed_axis(INPUTS, bits), OUTPUTS), "int32")
        return {"qweight": packed, **rest, "g_idx": index}

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        bits, scales = self.config.bits, stored["scales"].T.contiguous()
        if self.config.quant_method == "awq":
            values, points = (
                unpack_words(stored[name], bits, -1, _ORDER).T.contiguous()
                for name in ("qweight", "qzeros")
            )
            return (Codes(values, scales, points),)
        values = unpack_words(stored["qweight"], bits, 0).T.contiguous()
        zeros = unpack_words(stored["qzeros"], bits, 1).T.to(torch.int16).contiguous()
        if self.config.checkpoint_format == "gptq":
            zeros += 1
        return sorted_by_group(Codes(values, scales, zeros), stored.get("g_idx"), spec)
