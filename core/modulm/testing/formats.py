"""A fictitious quantization format with all the features of published ones.

`FakeFormat` holds int8 codes, stored input-major; a scale per fused part; a scale per block of 128
outputs and 32 inputs; an exponent per input, which the parts of a fused layer share; and optionally
an unused activation scale. Scales are powers of two, so `write_format` can write an exactly equal
plain checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
)

__all__ = ["FakeFormat", "FakeFormatConfig", "encode", "stored_weight", "write_format"]

ROWS, COLUMNS = 128, 32


@frozen
class FakeFormatConfig:
    """The format has no settings."""

    quant_method: str = "fake"


class FakeFormat(QuantizationMethod):
    """Dequantizes the format while loading."""

    name = "fake"
    api = 2
    Config = FakeFormatConfig

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        claimed = (checkpoint.quantization or {}).get("quant_method") == cls.name
        return "config.json has quant_method fake" if claimed else None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        return (
            None
            if spec.kind in (LinearKind.LINEAR, LinearKind.EXPERT)
            else f"{cls.name} does not support {spec.kind}"
        )

    def rename(self, name: str) -> str | None:
        """Map stored names to parameters: files call the blocks' scales their inverse."""
        return name.replace(".block_scale_inv", ".block_scale")

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        blocks = (OUTPUTS.blocks(ROWS), INPUTS.blocks(COLUMNS))
        return {
            "codes": ParamSpec(
                (OUTPUTS, INPUTS), "int8", stored="weight", transform=lambda t: t.transpose(-1, -2)
            ),
            "scale": ParamSpec((PARTS,), "float32"),
            "block_scale": ParamSpec(blocks, "float32"),
            "exponent": ParamSpec((INPUTS,), "int32"),
            "input_scale": ParamSpec((PARTS,), "float32", optional=True),
        }

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        weight = self._weight(layer, spec).to(getattr(torch, spec.dtype))
        for name in self.create(spec):
            layer.register_parameter(name, None)
        if spec.experts:
            layer.packed = self.ops.pack_experts(weight, len(spec.parts))
        else:
            layer.packed = self.ops.pack_linear(weight)

    def _weight(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        """Return [outputs, inputs] fp32, preceded by experts."""
        rows, columns = spec.output_block(ROWS), spec.input_block(COLUMNS)
        stored = layer.get_parameter("block_scale")
        tall = stored.repeat_interleave(rows, -2)[..., : spec.outputs, :]
        blocks = tall.repeat_interleave(columns, -1)[..., : spec.inputs]
        sizes = torch.tensor(spec.parts, device=blocks.device)
        scales = layer.get_parameter("scale").repeat_interleave(sizes, -1)
        powers = torch.exp2(layer.get_parameter("exponent").float())
        codes = layer.get_parameter("codes").float()
        weight: Tensor = codes * blocks * scales[..., None] * powers[..., None, :]
        return weight

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self.ops.linear(x, layer.packed, bias)
        return out

    def experts(self, layer: torch.nn.Module) -> object:
        return layer.packed

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        packed: Any = layer.packed
        if spec.experts:
            return torch.stack([packed[expert] for expert in range(spec.experts)])
        weight: Tensor = self.ops.unpack_linear(packed)
        return weight


def encode(outputs: int, inputs: int, exponent: Tensor, parts: int = 1) -> dict[str, Tensor]:
    """Return random tensors of a linear layer as the format stores it, named without its path."""
    grid = (-(-outputs // ROWS), -(-inputs // COLUMNS))
    return {
        "weight": torch.randint(-8, 8, (inputs, outputs), dtype=torch.int8),
        "scale": torch.exp2(torch.randint(-5, -2, (parts,)).float()).squeeze(),
        "block_scale_inv": torch.exp2(torch.randint(-1, 2, grid).float()),
        "exponent": exponent,
    }


def stored_weight(stored: Mapping[str, Tensor], sizes: tuple[int, ...] = ()) -> Tensor:
    """Return the [outputs, inputs] fp32 weight that tensors of `encode` represent. sizes: outputs
    of its parts.
    """
    codes = stored["weight"].T.float()
    rows = torch.arange(codes.shape[0]) // ROWS
    columns = torch.arange(codes.shape[1]) // COLUMNS
    scale = stored["scale"].reshape(-1)
    scales = scale.repeat_interleave(torch.tensor(sizes or codes.shape[:1]))
    weight: Tensor = codes * stored["block_scale_inv"][rows][:, columns] * scales[:, None]
    return weight * torch.exp2(stored["exponent"].float())


def write_format(plain: Path, target: Path, layers: str) -> None:
    """Copy a checkpoint to `target` in the format, and write the equal weights to `plain`.

    The weights whose name matches `layers` are new, random ones. Layers with the same input, which
    may be fused, share their exponents.
    """
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    coded: dict[str, Tensor] = {}
    exponents: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not re.search(layers, name):
            coded[name] = tensor
            continue
        path, inputs = name.removesuffix(".weight"), tensor.shape[1]
        drawn = torch.randint(-1, 1, (inputs,), dtype=torch.int32)
        exponent = exponents.setdefault(f"{path.rpartition('.')[0]} {inputs}", drawn)
        stored = encode(tensor.shape[0], inputs, exponent)
        coded |= {f"{path}.{key}": value.clone() for key, value in stored.items()}
        tensors[name] = stored_weight(stored).to(tensor.dtype).contiguous()
    target.mkdir()
    for file in plain.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(coded, target / "model.safetensors", {"format": "pt"})
    table = json.loads((target / "config.json").read_text())
    table["quantization_config"] = {"quant_method": "fake"}
    (target / "config.json").write_text(json.dumps(table))
