"""Writes checkpoints in the formats of quantization libraries, for bench/quantized.py.

Codes are those of quantization at load in groups of 128, laid out as in each format (sources: the
docstrings of the packages that read them). Only the layout matters, not the accuracy.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from modulm_quantized import SCHEMES, Scheme, pack_words, round_weight

__all__ = ["FORMATS", "make"]

GROUP = 128
_LAYER = re.compile(r"\.(self_attn|mlp)\.\w+_proj\.weight$")
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_INT8_INPUTS = {
    "num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True,
}  # fmt: skip


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 [N, K], scales and zero points [N, groups]."""
    found = round_weight(weight, Scheme("int4", columns=GROUP))
    assert found.zeros is not None
    return found.values, found.scales.half(), found.zeros.clamp(1, 15).to(torch.uint8)


def _awq(weight: Tensor) -> dict[str, Tensor]:
    codes, scales, zeros = _rounded(weight)

    def words(values: Tensor) -> Tensor:
        return pack_words(values.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2), 4, 1)

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}


def _gptq(weight: Tensor, order: Tensor | None = None) -> dict[str, Tensor]:
    inputs = weight.shape[1]
    order = torch.arange(inputs) if order is None else order
    codes, scales, zeros = _rounded(weight[:, order])
    back = order.argsort()
    return {
        "qweight": pack_words(codes[:, back].T, 4, 0),
        "qzeros": pack_words(zeros.T - 1, 4, 1),
        "scales": scales.T,
        "g_idx": (torch.arange(inputs) // GROUP)[back].int(),
    }


def _gptq_desc_act(weight: Tensor) -> dict[str, Tensor]:
    """Layers with the same inputs get the same column order, as from calibration."""
    seed = torch.Generator().manual_seed(weight.shape[1])
    return _gptq(weight, torch.randperm(weight.shape[1], generator=seed))


def _packed(weight: Tensor) -> dict[str, Tensor]:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1) / 7).clamp(min=1e-6).bfloat16()
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).add(8)
    return {
        "weight_packed": pack_words(codes.to(torch.uint8), 4, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def _channels(name: str) -> Callable[[Tensor], dict[str, Tensor]]:
    def write(weight: Tensor) -> dict[str, Tensor]:
        found = round_weight(weight, SCHEMES[name])
        return {"weight": found.values, "weight_scale": found.scales}

    return write


def _compressed(form: str, bits: int, kind: str, activations: object = None) -> dict[str, object]:
    weights: dict[str, object] = {"num_bits": bits, "type": kind, "symmetric": True}
    weights |= {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}

#: Name -> conversion of a layer, and quantization_config.
FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, object]]] = {
    "awq": (_awq, {**_AWQ, "version": "gemm"}),
    "gptq": (_gptq, {**_GPTQ, "desc_act": False}),
    "gptq-desc-act": (_gptq_desc_act, {**_GPTQ, "desc_act": True}),
    "ct-w4a16": (_packed, _compressed("pack-quantized", 4, "int")),
    "ct-w4a8": (_packed, _compressed("pack-quantized", 4, "int", _INT8_INPUTS)),
    "ct-w8a8": (_channels("int8"), _compressed("int-quantized", 8, "int", _INT8_INPUTS)),
    "fp8": (_channels("fp8"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
}


def make(plain: Path, folder: Path, name: str) -> Path:
    """Write the checkpoint `plain` in a format below `folder`, unless it exists."""
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    write, table = FORMATS[name]
    tensors: dict[str, Tensor] = {}
    with safe_open(plain / "model.safetensors", "pt") as opened:
        for stored in opened.keys():  # noqa: SIM118  it is no mapping
            tensor = opened.get_tensor(stored)
            if not _LAYER.search(stored):
                tensors[stored] = tensor
                continue
            stem = stored.removesuffix("weight")
            tensors |= {stem + key: value.contiguous() for key, value in write(tensor).items()}
    for file in plain.glob("*.json*"):
        shutil.copy(file, target)
    config = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": table}))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
