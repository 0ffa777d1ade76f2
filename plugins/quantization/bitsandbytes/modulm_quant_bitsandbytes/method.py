"""bitsandbytes checkpoints (Dettmers et al., arXiv 2208.07339 and 2305.14314).

4 bits: `weight` holds codes in row order, two per byte with the first in the high half, as bytes or
as numbers of any dtype. `weight.quant_map` holds the sixteen values of the codes, `weight.absmax`
the largest magnitude of each block. With double quantization, `absmax` holds codes into
`weight.nested_quant_map`, scaled by one `weight.nested_absmax` per 256 codes, plus an offset.
`weight.quant_state.bitsandbytes__nf4` (or `fp4`) is JSON text with the remaining settings. 8 bits:
`weight` int8 and `SCB`, 127 times the scale of each output. Source: QuantState.as_dict and
Linear8bitLt of bitsandbytes 0.50.

Activations are not rounded, so outlier features need no special treatment. A plain checkpoint,
including stacks of experts, is quantized while loading, to nf4 by default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any, ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import CheckpointError
from modulm_quant_bitsandbytes.rounding import LEVELS, round_to_int8, round_to_levels
from modulm_quantized import ACTIVATIONS, CodedMethod, Codes, StoredAs, below, nibbles

__all__ = ["BitsAndBytes", "BitsAndBytesConfig"]

_BLOCK, _NESTED_BLOCK = 64, 256
_LEAST = 8
#: Bytes reserved for a quant_state.
_STATE = 512
#: Keys of a quant_state.
_KEYS = ("quant_type", "blocksize", "shape")


@frozen
class BitsAndBytesConfig:
    """`quantization_config` of config.json. Without `quant_method`, a plain checkpoint is quantized
    at load.

    `activations`: what kernels round activations to before an int8 product, "bf16" (no rounding) or
    "int8". Other keys configure the library's own kernels.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = ""
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = field(default="", validator=validators.in_(("", "nf4", "fp4")))
    bnb_4bit_use_double_quant: bool = False
    llm_int8_skip_modules: tuple[str, ...] | None = None
    activations: str = field(default="bf16", validator=validators.in_(ACTIVATIONS))

    @property
    def levels(self) -> str:
        """The name of the values of 4-bit codes."""
        return self.bnb_4bit_quant_type or ("fp4" if self.quant_method else "nf4")


class BitsAndBytes(CodedMethod):
    """nf4 and fp4 in blocks of 64 inputs, and int8 with a scale per output."""

    name = "bitsandbytes"
    Config: ClassVar[type] = BitsAndBytesConfig
    config: BitsAndBytesConfig
    LISTS: ClassVar = {"llm_int8_skip_modules": below}
    HELD = ("linear", "expert")

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.input_shard.total % _LEAST or spec.inputs % _group(spec):
            return f"{cls.name}: {spec.inputs} inputs cannot be divided into blocks"
        return super().rejects(spec, platform)

    @property
    def stored(self) -> bool:
        """Whether the checkpoint is quantized."""
        return bool(self.config.quant_method)

    def skips(self, name: str) -> bool:
        return below(name, self.config.llm_int8_skip_modules or ())

    def activations(self, spec: LinearSpec) -> str:
        return self.config.activations

    def scheme(self, spec: LinearSpec) -> StoredAs:
        if self.config.load_in_8bit:
            return StoredAs.integers(8, 0)
        twice = ", stored in 8 bits" if self.config.bnb_4bit_use_double_quant else ""
        text = f"{self.config.levels}, a scale per {_BLOCK} weights{twice}"
        return StoredAs(text, "other")

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        if not self.stored:
            return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype)}
        if self.config.load_in_8bit:
            return {
                "weight": ParamSpec((OUTPUTS, INPUTS), "int8"),
                "scales": ParamSpec((OUTPUTS,), "float32", "SCB"),
                "form": ParamSpec((), "uint8", "weight_format", optional=True),
            }
        return self._four_bits(spec)

    def _four_bits(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        pairs, group = spec.input_shard.total // 2, _group(spec)
        nested = self.config.bnb_4bit_use_double_quant
        params = {
            "weight": ParamSpec(
                (OUTPUTS, INPUTS.packed(2)),
                "uint8",
                transform=lambda t: t.contiguous().view(torch.uint8).reshape(-1, pairs),
            ),
            "absmax": ParamSpec(
                (OUTPUTS, INPUTS.blocks(group)),
                "uint8" if nested else "float32",
                "weight.absmax",
                transform=_rows_of_blocks(spec),
            ),
            "levels": ParamSpec((fixed(16),), "float32", "weight.quant_map"),
            "state": ParamSpec(
                (PARTS, fixed(_STATE)),
                "uint8",
                f"weight.quant_state.bitsandbytes__{self.config.levels}",
                transform=lambda t: _padded(t, _STATE),
            ),
        }
        if nested:
            total = sum(shard.total for shard in spec.shards) * spec.input_shard.total
            size = -(-total // (_BLOCK * _NESTED_BLOCK))
            params["nested_absmax"] = ParamSpec(
                (PARTS, fixed(size)),
                "float32",
                "weight.nested_absmax",
                transform=lambda t: _padded(t, size),
            )
            params["nested_levels"] = ParamSpec((fixed(256),), "float32", "weight.nested_quant_map")
        return params

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        if name == "form":
            return torch.zeros((), dtype=torch.uint8)
        if name == "levels":
            return torch.tensor(LEVELS[self.config.levels])
        if name != "state":
            return None
        whole = spec.input_shard.total
        texts = [
            json.dumps(
                {"quant_type": self.config.levels, "blocksize": _BLOCK, "shape": [n.whole, whole]}
            )
            for n in spec.shards
        ]
        states = [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]
        return torch.stack([_padded(state, _STATE) for state in states])

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        if self.config.load_in_8bit:
            return (self._eight_bits(stored, spec),)
        if not self.stored:
            return (round_to_levels(stored["weight"], self.config.levels, _group(spec)),)
        states = [self._state(text, spec, part) for part, text in enumerate(stored["state"])]
        scales = stored["absmax"].float()
        if "nested_absmax" in stored:
            scales = torch.cat(
                [self._nested(stored, spec, part, state) for part, state in enumerate(states)]
            )
        return (Codes(nibbles(stored["weight"], high_first=True), scales, levels=stored["levels"]),)

    def _eight_bits(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Codes:
        if not self.stored:
            return round_to_int8(stored["weight"])
        form = stored.get("form")
        if form is not None and int(form):
            raise CheckpointError(
                f"{spec.name}.weight_format: {int(form)} is not supported; only 0 (row-major)"
            )
        return Codes(stored["weight"], stored["scales"][:, None] / 127)

    def _nested(
        self, stored: Mapping[str, Tensor], spec: LinearSpec, part: int, state: dict[str, Any]
    ) -> Tensor:
        """Return the scales of one part, [outputs of the part, groups of this rank].

        Blocks of scales are counted from the start of the stored tensor: at this part, or at the
        first part if the layer is stored as one tensor.
        """
        start = sum(spec.parts[:part])
        codes = stored["absmax"][start : start + spec.parts[part]]
        group, shard = _group(spec), spec.shards[part]
        first = shard.start
        if state["shape"][0] != shard.total:
            first += sum(shard.total for shard in spec.shards[:part])
        rows = first + torch.arange(spec.parts[part], device=codes.device)
        columns = torch.arange(codes.shape[1], device=codes.device)
        columns = spec.input_shard.start + columns * group
        block = (rows[:, None] * spec.input_shard.total + columns) // _BLOCK
        outer = stored["nested_absmax"][part][block // _NESTED_BLOCK]
        return stored["nested_levels"][codes.int()] * outer + state["nested_offset"]

    def _state(self, text: Tensor, spec: LinearSpec, part: int) -> dict[str, Any]:
        """Parse a quant_state. Raises CheckpointError if it does not match the layer."""
        names = spec.part_names or (spec.name,)
        where = f"{names[part]}.weight.quant_state.bitsandbytes__{self.config.levels}"
        try:
            state = json.loads(bytes(text.tolist()).rstrip(b"\0"))
            values = [state[key] for key in _KEYS]
            sizes = {spec.shards[part].total, sum(shard.total for shard in spec.shards)}
            offset = float(state.setdefault("nested_offset", 0.0))
            fits = values[2][0] in sizes and values[2][1] == spec.input_shard.total
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{where}: must have {', '.join(_KEYS)}: {error}") from error
        nested = state.get("nested_blocksize", _NESTED_BLOCK)
        expected = (self.config.levels, _BLOCK, _NESTED_BLOCK)
        if (values[0], values[1], nested) != expected or not fits or offset != offset:
            shape = [spec.shards[part].total, spec.input_shard.total]
            raise CheckpointError(f"{where}: {state}; expected {expected} and shape {shape}")
        return dict(state)


def _group(spec: LinearSpec) -> int:
    """Return the inputs per scale; blocks continue across rows."""
    return gcd(_BLOCK, spec.input_shard.total)


def _rows_of_blocks(spec: LinearSpec) -> Callable[[Tensor], Tensor]:
    """Return a function that spreads one value per block, in row order, to [N, groups]."""
    inputs, group = spec.input_shard.total, _group(spec)
    sizes = [shard.total for shard in spec.shards]
    sizes.append(sum(sizes))

    def spread(stored: Tensor) -> Tensor:
        flat = stored.reshape(-1)
        for outputs in sizes:
            if -(-outputs * inputs // _BLOCK) == len(flat):
                each = flat.repeat_interleave(_BLOCK // group)
                return each[: outputs * inputs // group].reshape(outputs, -1)
        raise ValueError(f"{len(flat)} blocks of {_BLOCK} do not match {inputs} inputs")

    return spread


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Pad a vector with zeros. Raises ValueError if it is too long."""
    flat = tensor.reshape(-1)
    if len(flat) > size:
        raise ValueError(f"{len(flat)} entries, at most {size} expected")
    return torch.nn.functional.pad(flat, (0, size - len(flat)))
