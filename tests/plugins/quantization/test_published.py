"""Checkpoints as quantizing libraries publish them, against transformers on what they stand for.

Those of compressed-tensors are written by that library. The others are written here from their
specifications: the libraries that write AWQ and GPTQ need a GPU's compiler to install.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from attrs import evolve, field, frozen
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import parametrize_sample, sample
from transformers import AutoModelForCausalLM

from modulm import LLM, SamplingParams
from modulm.cli.main import main
from modulm.config import EngineConfig
from modulm.contracts.quantization import LinearSpec
from modulm.errors import ConfigError, ModulmError
from modulm.loading import resolve_checkpoint
from modulm.nn.weight_layout import layout
from modulm.ops import bind
from modulm.plugins import manager
from modulm.plugins.options import structure
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_quant_fp8.method import FP8
from modulm_quantized import CodedMethod

GROUP = 32
TOKENS = [5, 77, 130, 9, 301, 42, 8, 250, 12, 400, 33, 60, 71, 15, 2, 99]
_LAYERS = re.compile(r"\.(self_attn|mlp|block_sparse_moe)\..*(proj(_with_mqa)?|w[123])\.weight$")


def coded(weight, bits, group):
    """weight: [N, K] -> codes [N, K], zeros, scales [N, groups], and what they stand for."""
    top = 2**bits - 1
    grouped = weight.float().unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / top).clamp(min=1e-5).half()
    wide = scales.float()
    zeros = (-low / wide).round().clamp(1, top)
    codes = (grouped / wide[..., None] + zeros[..., None]).round().clamp(0, top)
    dequantized = ((codes - zeros[..., None]) * wide[..., None]).flatten(1)
    return codes.flatten(1).long(), zeros.long(), scales, dequantized


def words(codes, bits, dim, order=None):
    """Codes in words of 32 bits along `dim`, the first in the lowest bits."""
    codes = codes.movedim(dim, -1)
    if order is not None:
        codes = codes.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
    stream = (codes[..., None] >> torch.arange(bits)) & 1
    packed = (stream.flatten(-2).unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_gemm(weight, case, name):
    codes, zeros, scales, dequantized = coded(weight, 4, case.group)
    stored = {
        "qweight": words(codes.T, 4, 1, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, 1, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return stored, dequantized


def awq_gemv(weight, case, name):
    codes, zeros, scales, dequantized = coded(weight, 4, case.group)
    room = 32 - zeros.shape[1]  # groups of 32 inputs round zeros up to four words
    stored = {
        "qweight": words(codes, 4, 1),
        "qzeros": words(torch.nn.functional.pad(zeros, (0, room)), 4, 1),
        "scales": torch.nn.functional.pad(scales, (0, room)),
    }
    return stored, dequantized


def gptq(weight, case, name, less=1, order=None):
    inputs = weight.shape[1]
    order = torch.arange(inputs) if order is None else order
    codes, zeros, scales, dequantized = coded(weight[:, order], case.bits, case.group)
    back = order.argsort()
    stored = {
        "qweight": words(codes[:, back].T, case.bits, 0),
        "qzeros": words(zeros.T - less, case.bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(inputs) // case.group)[back].int(),
    }
    return stored, dequantized[:, back]


def gptq_v2(weight, case, name):
    return gptq(weight, case, name, less=0)


def gptq_shuffled(weight, case, name):
    """Inputs in another order in each layer; v's differs from that of q and k."""
    seed = sum(name.rpartition(".")[0].encode()) if "v_proj" in name else len(weight[0])
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    return gptq(weight, case, name, order=order)


def fp8(weight, case, name):
    """One scale for all of the layer, or with 8 bits said one for each block."""
    rows, columns = (case.group, case.group) if case.bits == 8 else weight.shape
    grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    scales = 0.01 + torch.rand(grid, generator=torch.Generator().manual_seed(len(name))) / 50
    wide = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    values = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    key = "weight_scale_inv" if case.bits == 8 else "weight_scale"
    stored = {"weight": values, key: scales if case.bits == 8 else scales.squeeze()}
    return {**stored, "input_scale": torch.tensor(0.1)}, values.float() * wide


def fbgemm(weight, case, name):
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    values = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def compressed(weight, case, name):
    """By compressed-tensors itself, in the scheme of the case."""
    group = case.table["config_groups"]["group_0"]
    args = QuantizationArgs(**group["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=case.table["format"])
    whole = weight.float()
    pieces = whole.flatten()[None]
    if args.strategy in ("group", "tensor_group"):
        pieces = whole.unflatten(1, (-1, args.group_size))
    elif args.strategy == "channel":
        pieces = whole[:, None]
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = whole.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        pieces = blocks.transpose(1, 2).flatten(2)
    nested = args.strategy == "tensor_group"
    everything = generate_gparam(whole.amin(), whole.amax()) if nested else None
    scale, zeros = calculate_qparams(pieces.amin(-1), pieces.amax(-1), args, everything)
    state = {"weight": whole, "weight_scale": scale, "weight_zero_point": zeros}
    state |= {"weight_global_scale": everything} if nested else {}
    coder = BaseCompressor.get_value_from_registry(case.table["format"])
    packed = coder.compress(state, scheme)
    if not nested:
        return packed, coder.decompress(packed, scheme)["weight"].float()
    numbers = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
    scales = packed["weight_scale"].float().repeat_interleave(args.group_size, 1) / everything
    return packed, numbers * scales  # the library unpacks to bf16


def sparse(weight, case, name):
    """Two of every four inputs, and with fp8 rounded with a scale per output."""
    mask = torch.zeros_like(weight, dtype=torch.bool).unflatten(1, (-1, 4))
    mask.scatter_(2, weight.abs().unflatten(1, (-1, 4)).topk(2, 2).indices, True)
    mask = mask.flatten(1)
    stored = {"bitmask": (mask.unflatten(1, (-1, 8)).int() << torch.arange(8)).sum(-1).byte()}
    stored["shape"] = torch.tensor(weight.shape)[:, None]
    values, scale = weight.float(), torch.ones(len(weight), 1)
    if case.table["config_groups"]:
        scale = values.abs().amax(1, keepdim=True) / 448
        values = (values / scale).to(torch.float8_e4m3fn).float()
        stored["weight_scale"] = scale
    chosen = values[mask].unflatten(0, (len(weight), -1))
    fp8 = "weight_scale" in stored
    stored["compressed"] = chosen.to(torch.float8_e4m3fn) if fp8 else chosen
    return stored, values * mask * scale


NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
NF4 += (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
NF4 += (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
NF4 += (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
FP4 = (0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25)
FP4 += tuple(-level for level in FP4)


def bnb4(weight, case, name):
    """Blocks of 64 through all rows, with the largest of a block in eight bits themselves."""
    kind = case.table["bnb_4bit_quant_type"]
    levels = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % 64))
    blocks = flat.unflatten(0, (-1, 64))
    absmax = blocks.abs().amax(1)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    stored = {"weight.quant_map": levels}
    if case.table["bnb_4bit_use_double_quant"]:
        table = torch.linspace(-1, 1, 256)
        offset = absmax.mean()
        pads = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256))
        outer = pads.unflatten(0, (-1, 256)).abs().amax(1)
        wide = outer.repeat_interleave(256)[: len(absmax)]
        codes = ((absmax - offset) / wide)[:, None].sub(table).abs().argmin(1)
        absmax = table[codes] * wide + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = offset.item()
        stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
        stored["weight.absmax"] = codes.to(torch.uint8)
    else:
        stored["weight.absmax"] = absmax
    codes = (blocks / absmax[:, None])[..., None].sub(levels).abs().argmin(-1).flatten()
    codes = codes[: weight.numel()]
    pairs = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    storage = case.table.get("bnb_4bit_quant_storage", "uint8")
    stored["weight"] = pairs.flatten().view(getattr(torch, storage))[:, None]
    text = json.dumps(state).encode()
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).byte()
    dequantized = levels[codes] * absmax.repeat_interleave(64)[: weight.numel()]
    return stored, dequantized.view_as(weight)


def bnb8(weight, case, name):
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0).byte()}
    return stored, codes.float() * largest[:, None] / 127


def hqq(weight, case, name):
    """Groups are rows, or with axis 0 columns; rows lie on top of one another in a number."""
    params = case.table["quant_config"]["weight_quant_params"]
    bits, size, axis = params["nbits"], params["group_size"], params["axis"]
    laid = weight.float().reshape(-1, size) if axis else weight.float().reshape(size, -1)
    low, high = laid.amin(axis, keepdim=True), laid.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half()
    zero = (-low / scale.float()).half()
    codes = (laid / scale.float() + zero.float()).round().clamp(0, 2**bits - 1).int()
    count = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % count))
    pieces = padded.unflatten(0, (count, -1))
    shifts = bits * torch.arange(count - 1, -1, -1)[:, None, None]
    packed = (pieces << shifts).sum(0).to(torch.int32 if bits == 3 else torch.uint8)
    packed = packed.view(torch.float16) if params["view_as_float"] else packed
    dequantized = ((codes - zero.float()) * scale.float()).reshape(weight.shape)
    more = {"nbits": torch.tensor(bits), "axis": torch.tensor(axis), "shape": torch.tensor([1, 2])}
    return {"W_q": packed, "scale": scale, "zero": zero, **more}, dequantized


def mlx(weight, case, name):
    """Codes of any width one after the other, a scale and a bias per group."""
    bits = case.table.get(name.removesuffix(".weight"), case.table)["bits"]
    codes, zeros, scales, _ = coded(weight, bits, case.group)
    wide, biases = scales.float(), (-zeros * scales.float()).bfloat16().float()
    dequantized = codes.unflatten(1, (-1, case.group)) * wide[..., None] + biases[..., None]
    bias_name = "qbiases" if case.table.get("quant_method") == "metal" else "biases"
    packed = words(codes, bits, 1).view(torch.uint32)
    return {"weight": packed, "scales": scales, bias_name: biases.bfloat16()}, dequantized.flatten(
        1
    )


def bitnet(weight, case, name):
    """Rows r, r + N / 4 and so on in one byte; "autobitlinear" multiplies with the scale."""
    mean = weight.float().abs().mean()
    codes = (weight.float() / mean).round().clamp(-1, 1)
    dequantized = codes * mean
    if case.table.get("quantization_mode") == "online":
        return {"weight": weight}, dequantized
    if case.table["linear_class"] == "autobitlinear":
        return {"weight": codes.bfloat16(), "weight_scale": mean[None]}, dequantized
    four = (codes + 1).int().unflatten(0, (4, -1))
    packed = (four << 2 * torch.arange(4)[:, None, None]).sum(0).byte()
    return {"weight": packed, "weight_scale": 1 / mean[None]}, dequantized


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(weight, case, name):
    """e2m1 with a power of two for 32 inputs, or with an e4m3 scale for 16 and one for all."""
    size = case.group
    pieces = weight.float().unflatten(1, (-1, size))
    largest = pieces.abs().amax(-1)
    whole = largest.amax() / (6 * 448)
    if size == 32:
        exponents = (largest / 4).log2().floor()
        stored, scale = {"weight_scale": (exponents + 127).byte()}, torch.exp2(exponents)
    else:
        nested = (largest / 6 / whole).to(torch.float8_e4m3fn)
        scale = nested.float() * whole
        key, value = (
            ("weight_global_scale", 1 / whole) if case.bits == 8 else ("weight_scale_2", whole)
        )
        stored = {"weight_scale": nested, key: value, "input_scale": torch.tensor(0.5)}
    codes = (pieces / scale[..., None]).clamp(-6, 6)[..., None].sub(E2M1).abs().argmin(-1)
    numbers = E2M1[codes] * scale[..., None]
    codes = codes.flatten(1)
    key = "weight_packed" if case.bits == 8 else "weight"
    stored[key] = (codes[:, ::2] | codes[:, 1::2] << 4).byte()
    return stored, numbers.flatten(1)


def mxfp8(weight, case, name):
    pieces = weight.float().unflatten(1, (-1, 32))
    exponents = (pieces.abs().amax(-1) / 256).log2().floor()
    values = (pieces / torch.exp2(exponents)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    dequantized = values.float() * torch.exp2(exponents)[..., None]
    key = "weight_scale_inv" if case.table["quant_method"] == "mxfp8" else "weight_scale"
    return {"weight": values.flatten(1), key: (exponents + 127).byte()}, dequantized.flatten(1)


def mixed(weight, case, name):
    """The first layer in NVFP4, the second in fp8."""
    return (fp4 if ".0." in name else fp8)(weight, evolve(case, bits=4), name)


def quark(weight, case, name):
    """Integers: with a scale per output, or in groups that lie input by input."""
    settings = case.table["global_quant_config"]["weight"]
    if settings["dtype"] == "int8" and settings["qscheme"] == "per_channel":
        scale = weight.float().abs().amax(1) / 127
        codes = (weight.float() / scale[:, None]).round().to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]
    signed = settings["dtype"] == "int4"
    codes, zeros, scales, dequantized = coded(weight, 4, case.group)
    if signed:
        scales = weight.float().unflatten(1, (-1, case.group)).abs().amax(-1) / 7
        wide = scales.repeat_interleave(case.group, 1)
        codes = (weight.float() / wide).round().long()
        dequantized = codes * wide
    order = AWQ_ORDER if case.table["export"]["pack_method"] == "reorder" else None
    stored = {
        "weight": words(codes.T & 15, 4, 1, order),
        "weight_scale": scales.T.contiguous(),
        "weight_zero_point": words((zeros.T if not signed else zeros.T * 0), 4, 1, order),
    }
    return stored, dequantized


def torchao(weight, case, name):
    kind = case.table["quant_type"]["default"]["_type"]
    if kind.startswith("Int4"):
        return torchao_int4(weight, case)
    if kind.startswith("Float8"):
        stored, dequantized = fbgemm(weight, case, name)
    else:
        codes, zeros, scales, dequantized = coded(weight, case.bits, case.group)
        half = 2 ** (case.bits - 1)
        stored = {"weight": (codes - half).to(torch.int8), "weight_scale": scales}
        stored["zeros"] = (zeros - half).to(torch.int8)
        if kind == "Int8DynamicActivationInt8WeightConfig":
            stored, dequantized = bnb8(weight, case, name)
            stored = {"weight": stored["weight"], "weight_scale": stored["SCB"][:, None] / 127}
    called = {"weight": "qdata", "weight_scale": "scale", "zeros": "zero_point"}
    return {f"_weight_{called[key]}": value for key, value in stored.items()}, dequantized


def torchao_int4(weight, case):
    """Codes less 8 times a scale, and a number that is added."""
    codes, zeros, scales, _ = coded(weight, 4, case.group)
    scales, added = scales.float(), ((8 - zeros) * scales.float()).bfloat16()
    wide = [one.float().repeat_interleave(case.group, 1) for one in (scales, added)]
    dequantized = (codes - 8) * wide[0] + wide[1]
    data = case.table["quant_type"]["default"]["_data"]
    if data["int4_packing_format"] == "plain":
        signed = (codes - 8) & 15
        pairs = (signed[:, ::2] | signed[:, 1::2] << 4).byte().view(torch.int8)
        stored = {"qdata": pairs, "scale": scales.T, "zero_point": added.T}
        return {f"_weight_{key}": value for key, value in stored.items()}, dequantized
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % 1024))
    sizes = (rows // 8, padded.shape[1] // 128, 32, 4)
    row, tile, lane, word = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    row, first = row * 8 + lane // 4, tile * 128 + word * 32 + lane % 4 * 2
    offsets = (0, 8, 16, 24, 1, 9, 17, 25)
    tiles = sum(padded[row, first + offset] << 4 * i for i, offset in enumerate(offsets))
    tiles = torch.where(tiles >= 2**31, tiles - 2**32, tiles).int()
    pair = torch.stack([scales.float(), added.float()], -1).transpose(0, 1)
    pair = torch.nn.functional.pad(pair, (0, 0, 0, 0, 0, padded.shape[1] // case.group - len(pair)))
    return {"_weight_qdata": tiles, "_weight_scale_and_zero": pair}, dequantized


@frozen
class Case:
    """One format: the settings in config.json, how a layer is stored, and a tiny model.

    group: inputs that share a scale, 0 for all of a layer's.
    """

    table: dict
    write: object
    architecture: str = "Qwen2ForCausalLM"
    settings: dict = field(factory=dict)
    bits: int = 4
    group: int = GROUP


def gptq_table(bits, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}


def ct_table(form, bits, kind, strategy, activations=None, **more):
    """A scheme of compressed-tensors for all layers but the head."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
GEMM = {**AWQ, "version": "gemm", "modules_to_not_convert": None}
LATENT = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 64}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
CASES = {
    "awq": Case(GEMM, awq_gemm),
    "awq-gemv": Case({**AWQ, "version": "GEMV"}, awq_gemv),
    "awq-experts": Case(GEMM, awq_gemm, "Qwen3MoeForCausalLM", {"moe_intermediate_size": 64}),
    "awq-tied": Case(GEMM, awq_gemm, "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "awq-latent": Case(GEMM, awq_gemm, "Glm4MoeLiteForCausalLM", LATENT),
    "gptq-2": Case(gptq_table(2), gptq, bits=2),
    "gptq-3": Case(gptq_table(3), gptq, bits=3),
    "gptq-4": Case(gptq_table(4, desc_act=False, damp_percent=0.1, meta={"a": 1}), gptq),
    "gptq-8": Case(gptq_table(8), gptq, bits=8),
    "gptq-v2": Case(gptq_table(4, checkpoint_format="gptq_v2"), gptq_v2),
    "gptq-desc-act": Case(gptq_table(4, desc_act=True), gptq_shuffled),
    "gptq-channels": Case({**gptq_table(4), "group_size": -1}, gptq, group=0),
    "gptq-experts": Case(gptq_table(4), gptq, "MixtralForCausalLM", {"intermediate_size": 64}),
    "fp8": Case({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "fp8-blocks": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        fp8,
        "DeepseekV3ForCausalLM",
        {"moe_intermediate_size": 80},
        bits=8,
    ),
    "fbgemm": Case({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fbgemm),
    "ct-w4a16": Case(ct_table("pack-quantized", 4, "int", "group", group_size=GROUP), compressed),
    "ct-w4a16-zeros": Case(
        ct_table("pack-quantized", 4, "int", "group", group_size=GROUP, symmetric=False), compressed
    ),
    "ct-w3-experts": Case(
        ct_table("pack-quantized", 3, "int", "group", group_size=GROUP),
        compressed,
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 64},
    ),
    "ct-w8a16": Case(ct_table("pack-quantized", 8, "int", "channel"), compressed),
    "ct-w8a8": Case(ct_table("int-quantized", 8, "int", "channel", INT8), compressed),
    "ct-w8a8-tensor": Case(ct_table("int-quantized", 8, "int", "tensor", INT8), compressed),
    "ct-fp8": Case(ct_table("float-quantized", 8, "float", "channel", FLOAT8), compressed),
    "ct-fp8-blocks": Case(
        ct_table("float-quantized", 8, "float", "block", FLOAT8, block_structure=[32, 32]),
        compressed,
    ),
    "ct-mxfp4": Case(
        ct_table("mxfp4-pack-quantized", 4, "float", "group", group_size=32), compressed
    ),
    "ct-mxfp8": Case(ct_table("mxfp8-quantized", 8, "float", "group", group_size=32), compressed),
    "ct-nvfp4": Case(
        ct_table("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16), compressed
    ),
    "auto-round": Case({**AUTO, "packing_format": "auto_round:auto_gptq"}, gptq),
}


def bnb(kind, twice=False, **more):
    keys = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": twice, "load_in_4bit": True}
    return {"quant_method": "bitsandbytes", **keys, "llm_int8_skip_modules": None, **more}


def hqq_table(bits, size=GROUP, axis=1, view_as_float=False):
    params = {"nbits": bits, "group_size": size, "axis": axis, "view_as_float": view_as_float}
    table = {"weight_quant_params": {**params, "channel_wise": True, "optimize": True}}
    return {"quant_method": "hqq", "quant_config": table, "skip_modules": ["lm_head"]}


def quark_table(dtype, qscheme, **more):
    weight = {"dtype": dtype, "qscheme": qscheme, "symmetric": True, "is_dynamic": False, **more}
    inputs = {"dtype": "int8", "qscheme": "per_tensor"} if dtype == "int8" else None
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "kv_cache_group": []},
    }


def ao_table(kind, **data):
    default = {"_type": f"{kind}Config", "_version": 2, "_data": data}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": default},
        "modules_to_not_convert": ["lm_head"],
    }


def modelopt(algorithm, **more):
    table = {"quant_algo": algorithm, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    return {"quant_method": "modelopt", **table, **more}


MIXED = {
    f"model.layers.{layer}.{path}": {"quant_algo": "FP8" if layer else "NVFP4"}
    for layer in (0, 1, 2)
    for path in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}
SPARSE = {"format": "sparse-24-bitmask", "targets": ["Linear"], "ignore": ["lm_head"]}
MOE = "Qwen3MoeForCausalLM"
BLOCKS = {"moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32}
TIED = {"tie_word_embeddings": True}
INTX = {"_type": "PerGroup", "_data": {"group_size": GROUP}}
CASES |= {
    "ct-sparse": Case({**ct_table("dense", 8, "int", "channel"), "config_groups": {},
                       "sparsity_config": SPARSE}, sparse),
    "ct-sparse-fp8": Case(
        {**ct_table("float-quantized", 8, "float", "channel", FLOAT8), "sparsity_config": SPARSE},
        sparse,
    ),
    "ct-mxfp4-experts": Case(
        ct_table("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
        compressed, MOE, BLOCKS,
    ),
    "ct-nvfp4-experts": Case(
        ct_table("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
        compressed, MOE, BLOCKS,
    ),
    "ct-w8a16-experts": Case(
        ct_table("pack-quantized", 8, "int", "channel"), compressed, MOE, BLOCKS
    ),
    "ptpc": Case({"quant_method": "ptpc_fp8"}, fbgemm),
    "bnb-nf4": Case(bnb("nf4"), bnb4),
    "bnb-nf4-twice": Case(bnb("nf4", True, bnb_4bit_quant_storage="bfloat16"), bnb4),
    "bnb-nf4-fused": Case(bnb("nf4", True), bnb4, "Phi3ForCausalLM"),
    "bnb-fp4-tied": Case(bnb("fp4"), bnb4, "LlamaForCausalLM", TIED),
    "bnb-experts": Case(bnb("nf4", True), bnb4, MOE, BLOCKS),
    "bnb-int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
    "mlx-4": Case({"bits": 4, "group_size": GROUP}, mlx),
    "mlx-3": Case({"bits": 3, "group_size": GROUP}, mlx, "LlamaForCausalLM", TIED),
    "mlx-6-fused": Case({"bits": 6, "group_size": GROUP}, mlx, "Phi3ForCausalLM"),
    "mlx-mixed": Case(
        {"bits": 4, "group_size": GROUP, "model.layers.0.self_attn.v_proj": {"bits": 6}}, mlx
    ),
    "metal-8": Case({"quant_method": "metal", "bits": 8, "group_size": GROUP}, mlx),
    "hqq-4": Case(hqq_table(4), hqq),
    "hqq-8": Case(hqq_table(8), hqq),
    "hqq-3": Case(hqq_table(3), hqq),
    "hqq-2-floats": Case(hqq_table(2, view_as_float=True), hqq),
    "hqq-1-tied": Case(hqq_table(1), hqq, "LlamaForCausalLM", TIED),
    "hqq-axis-0": Case(hqq_table(4, axis=0), hqq),
    "hqq-fused": Case(hqq_table(4), hqq, "Phi3ForCausalLM"),
    "hqq-experts": Case(hqq_table(4, size=64), hqq, MOE, BLOCKS),
    "bitnet": Case({"quant_method": "bitnet", "linear_class": "bitlinear"}, bitnet),
    "bitnet-auto": Case({"quant_method": "bitnet", "linear_class": "autobitlinear"}, bitnet),
    "bitnet-online": Case(
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
        bitnet, "LlamaForCausalLM", TIED,
    ),
    "nvfp4": Case({"quant_method": "nvfp4", "ignore": ["lm_head"]}, fp4, group=16),
    "nvfp4-packed": Case({"quant_method": "nvfp4", "ignore": ["lm_head"]}, fp4, group=16, bits=8),
    "mxfp8": Case({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, mxfp8),
    "mxfp8-experts": Case(
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, mxfp8, MOE, BLOCKS
    ),
    "modelopt-fp8": Case(modelopt("FP8"), fp8),
    "modelopt-channels": Case(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fbgemm),
    "modelopt-nvfp4": Case(modelopt("NVFP4"), fp4, group=16),
    "modelopt-nvfp4-experts": Case(modelopt("NVFP4"), fp4, MOE, BLOCKS, group=16),
    "modelopt-mxfp4": Case(modelopt("MXFP4"), fp4),
    "modelopt-mxfp8": Case(modelopt("MXFP8"), mxfp8, "LlamaForCausalLM", TIED),
    "modelopt-mixed": Case(modelopt("MIXED_PRECISION", quantized_layers=MIXED), mixed, group=16),
    "quark-fp8": Case(quark_table("fp8_e4m3", "per_tensor"), fp8),
    "quark-fp8-channels": Case(quark_table("fp8_e4m3", "per_channel", ch_axis=0), fbgemm),
    "quark-int8": Case(quark_table("int8", "per_channel", ch_axis=0), quark),
    "quark-uint4": Case(
        quark_table("uint4", "per_group", group_size=GROUP, symmetric=False), quark
    ),
    "quark-int4": Case(
        {**quark_table("int4", "per_group", group_size=GROUP), "export": {"pack_method": "order"}},
        quark,
    ),
    "quark-mxfp4": Case(
        quark_table("fp4", "per_group", group_size=32, scale_format="e8m0"), fp4
    ),
    "quark-mxfp4-experts": Case(
        quark_table("fp4", "per_group", group_size=32, scale_format="e8m0"), fp4, MOE, BLOCKS
    ),
    "torchao-int8": Case(
        ao_table("Int8WeightOnly", granularity={"_type": "PerRow", "_data": {"dim": -1}}),
        torchao, bits=8, group=0,
    ),
    "torchao-w8a8": Case(ao_table("Int8DynamicActivationInt8Weight"), torchao),
    "torchao-intx": Case(ao_table("IntxWeightOnly", granularity=INTX), torchao, bits=4),
    "torchao-w8a4": Case(
        ao_table("Int8DynamicActivationIntxWeight", weight_granularity=INTX), torchao, bits=4
    ),
    "torchao-float8": Case(
        ao_table("Float8DynamicActivationFloat8Weight", granularity=[{"_type": "PerRow"}] * 2),
        torchao, "LlamaForCausalLM", TIED,
    ),
    "torchao-int4": Case(
        ao_table("Int4WeightOnly", group_size=GROUP, int4_packing_format="plain"), torchao
    ),
    "torchao-tiles": Case(
        ao_table("Int4WeightOnly", group_size=GROUP, int4_packing_format="tile_packed_to_4d"),
        torchao,
    ),
    "torchao-experts": Case(
        ao_table("Int4WeightOnly", group_size=64, int4_packing_format="plain"),
        torchao, MOE, BLOCKS, group=64,
    ),
}  # fmt: skip


def publish(folder: Path, case: Case) -> tuple[Path, Path]:
    """The checkpoint in its format, and a plain one of what it stands for."""
    folders = [make_tiny(folder / "coded", case.architecture, **case.settings), folder / "plain"]
    shutil.copytree(*folders)
    stored: dict = {}
    plain: dict = {}
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        if not _LAYERS.search(name):
            stored[name] = plain[name] = tensor
            continue
        case_of_tensor = evolve(case, group=case.group or tensor.shape[1])
        tensors, dequantized = case.write(tensor, case_of_tensor, name)
        path = name.removesuffix("weight")
        stored |= {f"{path}{key}": value.contiguous() for key, value in tensors.items()}
        plain[name] = dequantized.to(tensor.dtype).contiguous()
    save_file(stored, folders[0] / "model.safetensors", {"format": "pt"})
    save_file(plain, folders[1] / "model.safetensors", {"format": "pt"})
    write_settings(folders[0], quantization_config=case.table)
    return folders[0], folders[1]


def write_settings(folder: Path, **keys) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The checkpoint of a case and the plain one, by its name; each is written once."""

    @cache
    def folders(name: str) -> tuple[Path, Path]:
        return publish(tmp_path_factory.mktemp("published"), CASES[name])

    return folders


@pytest.fixture(scope="module", params=sample(CASES, every=24))
def folders(request, published):
    return published(request.param)


@pytest.fixture
def copy_of(published, tmp_path):
    """A copy of the checkpoint of a case, which the test may spoil."""
    return lambda name: shutil.copytree(published(name)[0], tmp_path / "own")


def test_the_numbers_of_the_dequantized_weights(folders):
    coded_folder, plain = folders
    session = Session(coded_folder, device="cpu", dtype="float32", block_size=16)
    logprobs = session.step({0: TOKENS})[0]
    oracle = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        wanted = oracle(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_bridge_reads_what_the_native_model_reads(name, published):
    folder = published(name)[0]
    native, bridged = (
        Session(folder, device="cpu", dtype="float32", model_impl=implementation).step({0: TOKENS})
        for implementation in ("modulm", "transformers")
    )
    torch.testing.assert_close(bridged[0], native[0], rtol=0, atol=1e-3)


def rounds_activations(folder: Path) -> bool:
    """Whether the format multiplies integers."""
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    if table.get("quant_method") in ("bitnet", "quark", "torchao"):
        return "bitnet" in str(table) or re.search(r"'input_tensors': {|ActivationInt", str(table))
    return INT8 in [group["input_activations"] for group in table.get("config_groups", {}).values()]


def layers_are_held_as_explained(session: Session) -> None:
    """Layers that are said to be kept in 16 bits are, and no others."""
    modules = session.model.modules()
    layers = [m for m in modules if isinstance(getattr(m, "method", None), CodedMethod)]
    assert layers
    for layer in layers:
        wide = "; dequantized to" in (layer.method.note(layer.spec) or "")
        packed_parts = (
            [layer.quantized] if layer.spec.experts else [one.weight for one in layer.quantized]
        )
        assert all((packed.format == "bf16") == wide for packed in packed_parts), layer.spec


def test_on_the_kernels_as_exact_as_bf16(folders):
    """Against our own run of the dequantized weights: what rounding to bf16 costs either, and
    rounding activations to integers where the format has it so."""
    exact = Session(folders[1], device="cpu", dtype="float32").step({0: TOKENS})[0]
    sessions = [Session(folder, device="cpu", dtype="bfloat16") for folder in folders]
    layers_are_held_as_explained(sessions[0])
    runs = [session.step({0: TOKENS})[0] for session in sessions]
    errors = [(run.float() - exact).abs().mean().item() for run in runs]
    assert errors[0] < (6 if rounds_activations(folders[0]) else 1.6) * errors[1]


@parametrize_sample(
    "name", ["gptq-desc-act", "ct-w8a8", "bnb-nf4", "modelopt-nvfp4-experts"], every=3
)
def test_answers_come_out(name, published):
    llm = LLM(str(published(name)[0]), dtype="bfloat16", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = llm.generate(["one two"], params, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 8


UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def text_of(table):
    return torch.tensor(list(json.dumps(table).encode())).byte()


#: What is wrong: the case, changed settings, changed tensors, and what is said.
BAD = {
    "a group that does not divide": ("gptq-4", {"group_size": 48}, {}, r"group size 48"),
    "an unknown width": ("gptq-4", {"bits": 5}, {}, r"bits.*5"),
    "a missing scale": ("gptq-4", {}, {f"{UP}.scales": None}, r"up_proj\.scales"),
    "a shape that does not fit": (
        "gptq-4", {}, {f"{UP}.qzeros": torch.zeros(1, 1).int()},
        r"up_proj.qzeros in model.safetensors is \[1, 1\], config.json asks for \[2, 12\]",
    ),
    "groups of several sizes": (
        "gptq-4", {}, {f"{DOWN}.g_idx": torch.zeros(96).int()}, r"down_proj.g_idx",
    ),
    "bnb: a missing scale": ("bnb-nf4", {}, {f"{UP}.weight.absmax": None}, r"up_proj.weight.absm"),
    "bnb: blocks of another size": (
        "bnb-nf4", {}, {f"{UP}.weight.absmax": torch.zeros(48)}, r"up_proj.weight.absmax.*\[48\]",
    ),
    "bnb: a state that says other blocks": (
        "bnb-nf4", {},
        {f"{UP}.{NF4_STATE}": text_of({"quant_type": "nf4", "blocksize": 128, "shape": [96, 64]})},
        r"up_proj.weight.quant_state.bitsandbytes__nf4.*128.*expected",
    ),
    "bnb: a state that is no table": (
        "bnb-nf4", {}, {f"{Q}.{NF4_STATE}": torch.zeros(4).byte()},
        r"q_proj.weight.quant_state.bitsandbytes__nf4: must have",
    ),
    "bnb: a state without end": (
        "bnb-nf4", {}, {f"{Q}.{NF4_STATE}": torch.zeros(999).byte()}, r"q_proj.weight.quant_state",
    ),
    "bnb: unknown numbers": ("bnb-nf4", {"bnb_4bit_quant_type": "nf3"}, {}, r"quant_type.*nf3"),
    "bnb: columns in another order": (
        "bnb-int8", {}, {f"{DOWN}.weight_format": torch.tensor(2).byte()},
        r"down_proj.weight_format: 2",
    ),
    "hqq: a group that does not divide": ("hqq-4", hqq_table(4, size=40), {}, r"group size 40"),
    "hqq: an unknown width": ("hqq-4", hqq_table(7), {}, r"nbits.*7"),
    "hqq: a missing scale": ("hqq-4", {}, {f"{UP}.scale": None}, r"up_proj.scale"),
    "hqq: rows that do not fit": (
        "hqq-3", {}, {f"{UP}.W_q": torch.zeros(3, 32).int()}, r"up_proj.W_q in model.safetensors",
    ),
    "bitnet: a missing scale": ("bitnet", {}, {f"{UP}.weight_scale": None}, r"up_proj.weight_s"),
    "bitnet: an unknown class": ("bitnet", {"linear_class": "trilinear"}, {}, r"linear_class"),
    "bitnet: weights that are not ternary": (
        "bitnet-auto", {}, {f"{UP}.weight": torch.full((96, 64), 0.5).bfloat16()},
        r"up_proj.weight in model.safetensors: weights are not all -1, 0 or 1",
    ),
    "modelopt: an unknown algorithm": (
        "modelopt-fp8", {"quant_algo": "W3A3"}, {}, r"quant_algo.*W3A3.*FP8"
    ),
    "modelopt: no algorithm": ("modelopt-fp8", {"quant_algo": ""}, {}, r"quant_algo.*missing"),
    "modelopt: a missing scale": (
        "modelopt-nvfp4", {}, {f"{UP}.weight_scale_2": None}, r"up_proj.weight_scale_2",
    ),
    "modelopt: parts that differ": (
        "modelopt-mixed",
        {"quantized_layers": {**MIXED, UP: {"quant_algo": "FP8"}}}, {}, r"up_proj: fused layers",
    ),
    "quark: an unknown dtype": ("quark-fp8", quark_table("fp6", "per_tensor"), {}, r"dtype.*fp6"),
    "quark: a group that does not divide": (
        "quark-uint4", quark_table("uint4", "per_group", group_size=48), {}, r"group size 48",
    ),
    "quark: a missing scale": ("quark-int8", {}, {f"{UP}.weight_scale": None}, r"up_proj.weight_s"),
    "torchao: an unknown configuration": (
        "torchao-w8a8", ao_table("UIntXWeightOnly"), {}, r"UIntXWeightOnlyConfig.*supported:",
    ),
    "torchao: a group that does not divide": (
        "torchao-int4", ao_table("Int4WeightOnly", group_size=48), {}, r"group size 48",
    ),
    "torchao: another packing": (
        "torchao-int4", ao_table("Int4WeightOnly", int4_packing_format="preshuffled"), {},
        r"int4_packing_format: 'preshuffled'; supported: plain",
    ),
    "torchao: a missing scale": (
        "torchao-int4", {}, {f"{UP}._weight_scale": None}, r"up_proj._weight_scale"
    ),
    "torchao: words that are no tiles": (
        "torchao-tiles", {}, {f"{UP}._weight_qdata": torch.zeros(12, 8, 16, 4).int()},
        r"up_proj._weight_qdata in model.safetensors is \[12, 8, 16, 4\]",
    ),
    "nvfp4: a missing scale": ("nvfp4", {}, {f"{UP}.weight_scale": None}, r"up_proj.weight_scale"),
    "nvfp4: no scale of scales": (
        "nvfp4", {}, {f"{n}_proj.weight_scale_2": None for n in (UP[:-5], UP[:-7] + "gate")},
        r"gate_up_proj: weight_scale_2 or weight_global_scale",
    ),
    "mxfp8: a shape that does not fit": (
        "mxfp8", {}, {f"{UP}.weight_scale_inv": torch.zeros(96, 4).byte()},
        r"up_proj.weight_scale_inv in model.safetensors is \[96, 4\].*asks for \[96, 2\]",
    ),
    "sparse: bits that do not fit": (
        "ct-sparse", {}, {f"{UP}.bitmask": torch.zeros(96, 8).byte()}, r"gate_up_proj.bitmask",
    ),
    "sparse: an unknown format": (
        "ct-sparse", {"sparsity_config": {**SPARSE, "format": "dense-24"}}, {}, r"dense-24",
    ),
}  # fmt: skip


@parametrize_sample("what", BAD, every=9)
def test_what_is_wrong_with_a_file_is_said(copy_of, what):
    name, changes, spoilt, message = BAD[what]
    folder = copy_of(name)
    write_settings(folder, quantization_config={**CASES[name].table, **changes})
    stored = {**load_file(folder / "model.safetensors"), **spoilt}
    tensors = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModulmError, match=message):
        Session(folder, device="cpu", dtype="float32")


#: What says how codes are meant, by the ends of names: of each format one is needed.
SCALES = ("weight_scale", "scales", "scale", "weight_scale_inv", "weight.absmax", "SCB",
          "_weight_scale", "_weight_scale_and_zero", "bitmask")  # fmt: skip


@pytest.fixture(scope="module")
def damaged(published, tmp_path_factory):
    """A folder like that of a case, with one tensor changed, and that tensor's name."""

    def folder(name, change):
        source, target = published(name)[0], tmp_path_factory.mktemp("damaged")
        for file in source.iterdir():
            (target / file.name).symlink_to(file)
        stored = load_file(source / "model.safetensors")
        ends = [n for end in SCALES for n in stored if "layers." in n and n.endswith(f".{end}")]
        changed = change(stored[ends[0]])
        stored = {n: t for n, t in stored.items() if n != ends[0]}
        stored |= {} if changed is None else {ends[0]: changed}
        (target / "model.safetensors").unlink()
        save_file(stored, target / "model.safetensors", {"format": "pt"})
        return target, ends[0]

    return folder


#: One that rounds at load has nothing beside weights.
SCALED = [name for name in CASES if name != "bitnet-online"]


def refused(folder):
    with pytest.raises(ModulmError) as caught:
        Session(folder, device="cpu", dtype="float32")
    return str(caught.value)


@parametrize_sample("name", SCALED, every=20)
def test_a_scale_that_is_missing_is_named_in_every_format(damaged, name):
    folder, tensor = damaged(name, lambda _: None)
    assert re.search(
        rf"missing weights: .*{re.escape(tensor.removesuffix('_inv'))}", refused(folder)
    )


@parametrize_sample("name", SCALED, every=16)
def test_a_shape_that_does_not_fit_is_named_in_every_format(damaged, name):
    """The file, the tensor, what it is and what is needed."""
    folder, tensor = damaged(name, lambda tensor_before: torch.zeros(7, 5).to(tensor_before.dtype))
    message = rf"{re.escape(tensor)} in model\.safetensors.*\[7, 5\].*(asks for|is not) \[\d*"
    assert re.search(message, refused(folder))


@parametrize_sample("name", CASES, every=24)
def test_a_file_that_is_cut_short_is_named_in_every_format(published, tmp_path, name):
    for file in published(name)[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    cut = tmp_path / "model.safetensors"
    content = cut.read_bytes()
    cut.unlink()
    cut.write_bytes(content[:-3])
    message = (
        r"model\.safetensors: .*: the file is truncated: it needs \d+ bytes of data and has \d+"
    )
    assert re.search(message, refused(tmp_path))


#: The case, settings that no reader knows, and what is said of them.
UNKNOWN = {
    "awq: version": ("awq", {"version": "tiles"}, r"version.*tiles"),
    "awq: bits": ("awq", {"bits": 3}, r"bits.*3"),
    "awq: group": ("awq", {"group_size": 48}, r"group size 48"),
    "gptq: form": ("gptq-4", {"checkpoint_format": "gptq_v9"}, r"checkpoint_format.*gptq_v9"),
    "auto-round: form": ("auto-round", {"packing_format": "auto_round:x"}, r"packing_format: .x"),
    "auto-round: group": ("auto-round", {"group_size": 48}, r"group size 48"),
    "fp8: numbers": ("fp8", {"fmt": "e3m4"}, r"fmt.*e3m4"),
    "fp8: blocks": ("fp8-blocks", {"weight_block_size": [32]}, r"weight_block_size: must be two"),
    "fp8: blocks of nothing": ("fp8-blocks", {"weight_block_size": [0, 32]}, r"weight_block_size"),
    "fbgemm: numbers": ("fbgemm", {"fmt": "e3m4"}, r"fmt.*e3m4"),
    "ptpc: numbers": ("ptpc", {"fmt": "e3m4"}, r"fmt.*e3m4"),
    "mxfp8: numbers": ("mxfp8", {"fmt": "e5m2"}, r"fmt.*e5m2"),
    "mxfp8: blocks": ("mxfp8", {"weight_block_size": [1, 64]}, r"weight_block_size"),
    "mxfp8: scales": ("mxfp8", {"scale_fmt": "float"}, r"scale_fmt.*float"),
    "nvfp4: group": ("nvfp4", {"group_size": 32}, r"group_size.*32"),
    "ct: form": ("ct-w4a16", {"format": "pack-more"}, r"format.*pack-more.*supported:"),
    "ct: marlin-24": ("ct-w4a16", {"format": "marlin-24"}, r"marlin-24 needs 4 or 8 bits"),
    "ct: kind": (
        "ct-w4a16", ct_table("pack-quantized", 4, "complex", "group", group_size=GROUP), r"complex",
    ),
    "ct: scope": ("ct-w4a16", ct_table("pack-quantized", 4, "int", "row"), r"strategy.*row"),
    "ct: group": (
        "ct-w4a16", ct_table("pack-quantized", 4, "int", "group", group_size=48), r"group size 48",
    ),
    "ct: no group": (
        "ct-w4a16", ct_table("pack-quantized", 4, "int", "group", group_size=0), r"group size 0",
    ),
    "ct: status": ("ct-w4a16", {"quantization_status": "calibration"}, r"must be compressed"),
    "ct: transforms": (
        "ct-w4a16", {"transform_config": {"config_groups": {"u": {}}}}, r"transform_config",
    ),
    "hqq: axis": ("hqq-4", hqq_table(4, axis=2), r"axis.*2"),
    "quark: scope": ("quark-int8", quark_table("int8", "per_head"), r"qscheme.*per_head"),
    "a name that nobody claims": ("fp8", {"quant_method": "fp5"}, r"fp5"),
}  # fmt: skip


@parametrize_sample("what", UNKNOWN, every=3)
def test_settings_that_are_unknown_are_named(published, tmp_path, what):
    name, changes, message = UNKNOWN[what]
    for file in published(name)[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    config["quantization_config"] = {**CASES[name].table, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert re.search(message, refused(tmp_path))


#: vLLM's names -> a checkpoint that each reads, "plain" where it rounds one.
NAMES = {
    "awq": "awq", "auto_awq": "awq", "awq_marlin": "awq", "gptq": "gptq-4", "auto_gptq": "gptq-4",
    "gptq_marlin": "gptq-4", "inc": "auto-round", "moe_wna16": "gptq-4", "fp8": "fp8",
    "fbgemm_fp8": "fbgemm", "compressed-tensors": "ct-w4a16", "quark": "quark-int8",
    "torchao": "torchao-int8", "modelopt": "modelopt-fp8", "modelopt_fp4": "modelopt-nvfp4",
    "modelopt_mxfp8": "modelopt-mxfp8", "modelopt_mixed": "modelopt-mixed", "mxfp8": "mxfp8",
    "bitsandbytes": "bnb-nf4", "experts_int8": "plain", "online": "plain", "mxfp4": "plain",
    "gpt_oss_mxfp4": "plain", "fp8_per_tensor": "plain", "fp8_per_block": "plain",
    "fp8_per_channel": "plain", "int8_per_channel_weight_only": "plain",
    "nvfp4_per_token": "plain",
}  # fmt: skip


#: Bits of the mantissa of those that round a plain checkpoint; the others round experts only.
MANTISSA = {
    "mxfp4": 1, "gpt_oss_mxfp4": 1, "nvfp4_per_token": 1, "fp8_per_tensor": 3, "fp8_per_block": 3,
    "fp8_per_channel": 3,
}  # fmt: skip


@parametrize_sample("name", NAMES, every=7)
def test_names_of_vllm(published, name):
    """As without the name where the checkpoint says it, or where there are no experts to round;
    else as far from the plain one's numbers as the format rounds.

    A mantissa of m bits has steps of 2^-m of the power of two below, so rounding errs by
    2^-m / sqrt(12) of that power (rms). Mantissas x in [1, 2) are distributed as 1 / x, and the
    mean of 1 / x^2 is 3 / (8 ln 2): a value errs by r = 2^-m * sqrt(3 / (8 ln 2) / 12) of itself.
    A product of rounded weights with rounded activations has two such errors. Four products follow
    one another in each of two layers (value, output, up, down), and their errors are independent:
    r * sqrt(2 * 4 * 2) of the logits' spread, as a mean of absolute values times sqrt(2 / pi).
    """
    case = NAMES[name]
    folder = published("awq")[1] if case == "plain" else published(case)[0]
    flags = {"device": "cpu", "dtype": "float32"}
    logprobs = Session(folder, **flags, quantization=name).step({0: TOKENS})[0]
    wanted = Session(folder, **flags).step({0: TOKENS})[0]
    if name in MANTISSA:
        rounding = 2.0 ** -MANTISSA[name] * math.sqrt(3 / (8 * math.log(2)) / 12)
        expected = rounding * math.sqrt(2 * 4 * 2) * math.sqrt(2 / math.pi) * wanted.std()
        assert expected / 4 < (logprobs - wanted).abs().mean() < expected
    else:
        assert torch.equal(logprobs, wanted)


@pytest.mark.parametrize("name", ["humming", "fp_quant", "deepseek_v4_fp8"])
def test_names_of_vllm_that_nothing_reads_are_refused_with_what_there_is(published, name):
    config = EngineConfig.from_keywords(
        model=str(published("awq")[1]), device="cpu", quantization=name
    )
    with pytest.raises(ConfigError, match=rf"{name}.*(did you mean|available: .*torchao)"):
        resolve_checkpoint(config, manager.current())


def test_a_head_that_is_quantized(tmp_path):
    """By the format whose parameters are called as a head's own settings were."""
    table = {**ct_table("int-quantized", 8, "int", "channel"), "ignore": []}
    folder = make_tiny(tmp_path, "LlamaForCausalLM", num_hidden_layers=1, tie_word_embeddings=False)
    stored = load_file(folder / "model.safetensors")
    exact = Session(folder, device="cpu", dtype="float32").step({0: TOKENS})[0]
    for name in [n for n in stored if _LAYERS.search(n) or n == "lm_head.weight"]:
        tensors, _ = bnb8(stored[name], None, name)
        stored[name] = tensors["weight"]
        stored[f"{name}_scale"] = tensors["SCB"][:, None] / 127
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    write_settings(folder, quantization_config=table)
    logprobs = Session(folder, device="cpu", dtype="float32").step({0: TOKENS})[0]
    assert 0 < (logprobs - exact).abs().mean() < 0.1


def test_two_methods_that_claim_a_checkpoint_are_named(copy_of):
    folder = copy_of("modelopt-fp8")
    table = {**CASES["modelopt-fp8"].table, "quant_method": "modelopt_rival"}
    write_settings(folder, quantization_config=table)
    rival = type(
        "Rival", (FP8,), {"name": "rival", "claims": classmethod(lambda c, _: "so it says")}
    )
    manager.current().register("quantization", "rival", rival)
    try:
        with pytest.raises(ConfigError, match=r"modelopt and rival match the checkpoint"):
            Session(folder, device="cpu", dtype="float32")
    finally:
        manager.current().unregister("quantization", "rival")


def test_settings_in_a_file_of_their_own(copy_of, published):
    """Older versions of ModelOpt write hf_quant_config.json and leave config.json alone."""
    folder, plain = copy_of("modelopt-nvfp4"), published("modelopt-nvfp4")[1]
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    table = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(table))
    logprobs, wanted = (
        Session(one, device="cpu", dtype="float32").step({0: TOKENS})[0] for one in (folder, plain)
    )
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-3)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "X"}}))
    with pytest.raises(ModulmError, match="quant_algo: 'X'"):
        Session(folder, device="cpu", dtype="float32")
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(
        ModulmError, match=r"hf_quant_config.json: must have a table `quantization`"
    ):
        Session(folder, device="cpu", dtype="float32")


EXPLAINED = {
    "modelopt-mixed": [
        r"NVFP4, a scale per 16 inputs(?!; held).*mlp.gate_up_proj of 0",
        r"FP8, a scale per tensor; .*mlp.gate_up_proj of 1, 2",
    ],
    "ct-nvfp4-experts": [r"float4 .*a scale per 16 inputs(?!; held).*experts"],
    "ct-mxfp4-experts": [r"float4 .*a scale per 32 inputs; .*experts"],
    "bnb-nf4": [r"nf4, a scale per 64 weights; dequantized to bfloat16.*layers.\*.mlp.down_proj"],
    "gptq-desc-act": [
        r"int4, a scale and zero point per 32 inputs, inputs sorted.*self_attn.o_proj"
    ],
}


@parametrize_sample("name", EXPLAINED, every=3)
def test_explain_names_the_scheme_of_layers(name, published, capsys):
    folder = published(name)[0]
    with pytest.raises(SystemExit):
        main(["explain", str(folder), "--dtype", "bfloat16"])
    output = capsys.readouterr().out
    for line in EXPLAINED[name]:
        assert re.search(line, output), output


WRITTEN = sorted(Path(__file__).with_name("written").glob("*.safetensors"))


@parametrize_sample("file", WRITTEN, every=9, ids=lambda file: file.stem)
def test_what_the_library_wrote(file):
    """A layer [32, 64] as the format's own library stored it, and what that gives back for it.

    Written by bitsandbytes 0.50.2, hqq 0.2.8, MLX 0.32.4, torchao 0.18.0, nvidia-modelopt 0.47.0,
    amd-quark 0.13, compressed-tensors 0.11.0 (sparse) and transformers 5.23.0 (bitnet). Most are
    not installed here: together they take 170 MB.
    """
    with safe_open(file, "pt") as opened:
        table = json.loads(opened.metadata()["quantization_config"])
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    expected = stored.pop("meant")
    driver = manager.current().load("quantization", table["quant_method"])
    method = driver(
        structure(table, driver.Config, "table"),
        manager.current().load("platforms", "cpu")(),
        bind(),
    )
    spec = LinearSpec("layer", 64, (32,), False, "float32", part_names=("layer",))
    layer = torch.nn.Module()
    for name, param in method.create(spec).items():
        (part,) = layout(param, param.stored or name, spec, ("layer",))[0]
        names = [key for key in stored if method.rename(key) == part.name]
        if not names and param.optional:
            layer.register_parameter(name, None)
            continue
        (key,) = names
        value = part.view(stored.pop(key)).to(getattr(torch, param.dtype))
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    assert all(method.rename(key) is None for key in stored), list(stored)
    method.finish(layer, spec)
    torch.testing.assert_close(method.dequantize(layer, spec), expected, rtol=8e-3, atol=1e-6)


@pytest.mark.exhaustive
@parametrize_sample(("tag", "bits", "group"), [("a", 4, 0), ("b", 4, 128), ("c", 8, 0)], every=3)
def test_sparse_layers_in_the_order_of_a_kernel(tag, bits, group):
    """marlin-24, written by compressed-tensors 0.11.0 (later ones cannot); alone, and twice in a
    fused layer."""
    recorded = load_file(Path(__file__).with_name("marlin24.safetensors"))
    codes, scale = recorded[f"{tag}.codes"], recorded[f"{tag}.scale"].float()
    outputs, inputs = codes.shape
    dequantized = codes * scale.repeat_interleave(inputs // scale.shape[1], 1)
    more = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **more}
    table = {"format": "marlin-24", "config_groups": {"g": {"targets": ["Linear"]}}}
    table["config_groups"]["g"]["weights"] = weights
    driver = manager.current().load("quantization", "compressed-tensors")
    method = driver(
        structure(table, driver.Config, "table"),
        manager.current().load("platforms", "cpu")(),
        bind(),
    )
    names = {"words": "weight_packed", "meta": "meta", "scale": "scale_packed"}
    for times in (1, 2):
        parts = tuple(f"layer{i}" for i in range(times))
        spec = LinearSpec("layer", inputs, (outputs,) * times, False, "float32", part_names=parts)
        stored = {
            key: torch.cat([recorded[f"{tag}.{name}"]] * times, 1) for key, name in names.items()
        }
        shapes = {key: param.shape(spec) for key, param in method.create(spec).items()}
        assert shapes == {key: tuple(tensor.shape) for key, tensor in stored.items()}
        stored["scale"] = stored["scale"].float()
        (decoded,) = method.codes(stored, spec)
        torch.testing.assert_close(decoded.weight(torch.float32), torch.cat([dequantized] * times))
