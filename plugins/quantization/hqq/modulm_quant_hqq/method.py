"""HQQ checkpoints (half-quadratic quantization, Badri and Shaji 2023), as transformers saves them.

A weight is reshaped into groups: with `axis` 1, each row of [N K / group, group] is a group; with
`axis` 0, each column of [group, N K / group]. `W_q` packs blocks of its rows on top of one another:
with 4 bits, the first half of the rows in the high halves of the bytes; with 3 bits, ten rows per
int32. `scale` and `zero` have an entry per group. A weight is scale * (code - zero) with real zero
points. Source: Quantizer and BitPack of hqq 0.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import ConfigError
from modulm.structure import Problem, structure_table
from modulm_quantized import CodedMethod, Codes, StoredAs, below

__all__ = ["HQQ", "HQQConfig", "Params"]

#: Bits of a code -> (bits in storage, codes per stored number, dtype of that number).
_PACKING = {
    8: (8, 1, torch.uint8),
    6: (8, 1, torch.uint8),
    5: (8, 1, torch.uint8),
    4: (4, 2, torch.uint8),
    3: (3, 10, torch.int32),
    2: (2, 4, torch.uint8),
    1.58: (2, 4, torch.uint8),
    1: (1, 8, torch.uint8),
}
_NEEDLESS = re.compile(
    r"\.(nbits|group_size|shape|axis|packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero"
    r"|compute_dtype|offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize"
    r"|round_zero)$"
)
_WEIGHT = "weight_quant_params"


@frozen
class Params:
    """`weight_quant_params` of a layer."""

    OPEN_ENDED: ClassVar[bool] = True

    nbits: float = field(default=4, validator=validators.in_(_PACKING))
    group_size: int | None = field(default=64, validator=validators.optional(validators.gt(0)))
    axis: int = field(default=1, validator=validators.in_((0, 1)))
    view_as_float: bool = False
    channel_wise: bool = field(default=True, validator=validators.in_((True,)))

    def rows(self, inputs: int, outputs: int) -> int:
        """Return the number of rows of the grouped layout."""
        size = self.group_size or (inputs if self.axis else outputs)
        return outputs * inputs // size if self.axis else size


@frozen
class HQQConfig:
    """`quantization_config` of config.json.

    `quant_config` is a table for all layers, or a table per layer name, without "model", "layers"
    and numbers.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "hqq"
    quant_config: dict[str, Any] = field(factory=dict)
    skip_modules: tuple[str, ...] = ("lm_head",)


class HQQ(CodedMethod):
    """Codes of 1 to 8 bits with real zero points."""

    name = "hqq"
    Config: ClassVar[type] = HQQConfig
    config: HQQConfig
    LISTS: ClassVar = {"skip_modules": below}

    def skips(self, name: str) -> bool:
        return self.skips_fused(name) or self._of(name) is None

    def skips_fused(self, name: str) -> bool:
        return below(name, self.config.skip_modules)

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name

    def scheme(self, spec: LinearSpec) -> StoredAs:
        params = self._params(spec)
        bits = _PACKING[params.nbits][0]
        if params.axis == 0:
            size = params.group_size
            text = f"int{bits}, a scale and zero point per {size or 'all'} outputs and input"
            return StoredAs(text, "other")
        return StoredAs.integers(bits, params.group_size or 0, zeros=True)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        params, total = self._params(spec), spec.input_shard.total
        size = params.group_size
        if params.axis and size is not None and (total % size or spec.inputs % size):
            raise ConfigError(
                "quantization_config.quant_config",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        sizes = [shard.total for shard in spec.shards]
        unpack = _unpacker(params, total, {*sizes, sum(sizes)})
        if params.axis == 0:
            groups, spread = INPUTS, _repeated(params, total, sizes)
        else:
            per_row = total // (size or total)
            groups = INPUTS.blocks(size) if size else fixed(1)
            spread = lambda t: t.reshape(-1, per_row)  # noqa: E731
        return {
            "values": ParamSpec((OUTPUTS, INPUTS), "uint8", "W_q", transform=unpack),
            "scale": ParamSpec((OUTPUTS, groups), "float32", transform=spread),
            "zero": ParamSpec((OUTPUTS, groups), "float32", transform=spread),
        }

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        if name != "values":
            return None
        return torch.arange(spec.inputs) % 2 ** _PACKING[self._params(spec).nbits][0]

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        return (Codes(stored["values"], stored["scale"], stored["zero"]),)

    def _params(self, spec: LinearSpec) -> Params:
        """Return the settings of a layer. Raises ConfigError if fused parts differ."""
        names = spec.part_names or (spec.name,)
        settings = {self._of(name) for name in names}
        params = settings.pop()
        if settings or params is None:
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config.quant_config",
                f"{listed}: fused layers have different settings",
            )
        return params

    def _of(self, name: str) -> Params | None:
        """Return the settings of a layer name; None if it is not quantized. Raises ConfigError."""
        config = self.config.quant_config
        tag = ".".join(
            part
            for part in name.split(".")
            if part not in ("model", "layers") and not part.isdigit()
        )
        table = config if _WEIGHT in config or "nbits" in config or not config else config.get(tag)
        if table is None:
            return None
        for key in ("scale_quant_params", "zero_quant_params"):
            if table.get(key):
                raise ConfigError(
                    f"quantization_config.quant_config.{key}", "quantized scales are not supported"
                )
        try:
            return structure_table(table.get(_WEIGHT, table), Params, open_ended=True)
        except Problem as problem:
            path = f"quantization_config.quant_config.{_WEIGHT}"
            raise ConfigError(path, str(problem)) from problem


def _unpacker(params: Params, inputs: int, sizes: set[int]) -> Callable[[Tensor], Tensor]:
    """Return a function from stored codes to [N, K] uint8, where N is one of `sizes`."""
    bits, count, dtype = _PACKING[params.nbits]

    def unpack(stored: Tensor) -> Tensor:
        packed = stored.contiguous().view(dtype) if params.view_as_float else stored.to(dtype)
        shifts = [bits * (count - 1 - i) for i in range(count)]
        rows = torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in shifts]).to(
            torch.uint8
        )
        for outputs in sizes:
            needed = params.rows(inputs, outputs)
            padding = len(rows) - needed
            if needed * rows.shape[1] == outputs * inputs and 0 <= padding < count:
                return rows[:needed].reshape(-1, inputs)
        raise ValueError(
            f"shape {list(stored.shape)} does not hold {sorted(sizes)} rows of {inputs} codes"
        )

    return unpack


def _repeated(params: Params, inputs: int, sizes: list[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that repeats scales of groups along outputs to [N, K]."""

    def spread(stored: Tensor) -> Tensor:
        flat = stored.reshape(1, -1)
        size = params.group_size
        if size is None:
            fitting = [n for n in (*sizes, sum(sizes)) if flat.numel() == inputs]
            size = fitting[0]
        return flat.expand(size, -1).reshape(-1, inputs)

    return spread
