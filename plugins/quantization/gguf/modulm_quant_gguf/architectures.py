"""Map tensor names in GGUF files to the weight names of each architecture.

Sources: gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py of llama.cpp; weight names of our
models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from modulm_quant_gguf.container import Model, TensorInfo
from modulm_quant_gguf.entries import Entry, joined, linear, plain, rows, unpermuted
from modulm_quant_gguf.keys import Keys

__all__ = ["ARCHITECTURES", "Layout", "entries"]

#: Converts a tensor that needs more than a new name: (model's keys, tensor, path of its layer,
#: suffix "weight" or "bias") -> entries.
Special = Callable[[Keys, TensorInfo, str, str], Iterable[Entry]]

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = {**_ATTENTION, **_MLP}
_FUSED = {**_BLOCK, "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "=mlp.gate.e_score_correction_bias",
}
#: Rotary factors, which the configuration reads, and precomputed angles.
_UNUSED = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd")
#: Matrices that are not the weight of a linear layer.
_NO_LAYER = ("ssm_conv1d", "ssm_a", "ssm_d", "attn_q_norm", "attn_k_norm")


@frozen(eq=False)
class Layout:
    """Names of one architecture.

    A name that begins with "=" is complete; others get the suffix ".weight" or ".bias". less:
    offset that the converter added to norm weights. permuted: tensors whose rows the converter
    reordered -> the key with their number of heads.
    """

    layer: Mapping[str, str]
    top: Mapping[str, str] = field(factory=lambda: _TOP)
    prefix: str = "model.layers."
    less: float = 0.0
    permuted: Mapping[str, str] = field(factory=dict)
    special: Mapping[str, Special] = field(factory=dict)


def entries(model: Model, keys: Keys, layout: Layout) -> Iterator[Entry]:
    """Yield all tensors of the file under the model's names; unknown tensors keep their names."""
    for info in model.tensors.values():
        layer = _LAYER.fullmatch(info.name)
        path, rest = (f"{layout.prefix}{layer[1]}.", layer[2]) if layer else ("", info.name)
        stem, _, suffix = rest.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = rest, ""
        if stem in _UNUSED:
            continue
        special = layout.special.get(stem)
        if special is not None:
            yield from special(keys, info, path, suffix)
            continue
        names = layout.layer if layer else layout.top
        yield _entry(layout, keys, info, path + names.get(stem, stem), stem, suffix)


def _entry(
    layout: Layout, keys: Keys, info: TensorInfo, target: str, stem: str, suffix: str
) -> Entry:
    if "=" in target:
        return plain(target.replace("=", ""), [info])
    counted = layout.permuted.get(stem)
    change = unpermuted(keys.heads(counted)) if counted else None
    if suffix == "weight" and len(info.shape) > 1 and stem not in _NO_LAYER:
        return linear(target, info) if change is None else linear(target, info, change)
    name = f"{target}.{suffix}" if suffix else target
    if change is None and layout.less and stem.endswith("norm"):
        less = layout.less
        return plain(name, [info], lambda tensors: tensors[0] - less)
    return plain(name, [info]) if change is None else plain(name, [info], change)


def _sibling(info: TensorInfo, keys: Keys, stem: str) -> TensorInfo:
    """Return the tensor of the same layer and suffix with the name `stem`."""
    layer, suffix = info.name.split(".")[1], info.name.rpartition(".")[2]
    return keys.tensor(f"blk.{layer}.{stem}.{suffix}")


def _falcon_qkv(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Split the fused projection, which the converter stores as queries, keys and values."""
    size = keys.head_size
    ends = [keys.heads("head_count") * size]
    ends += [ends[0] + keys.heads("head_count_kv") * size]
    starts = [0, *ends]
    for part, begin, end in zip("qkv", starts, [*ends, info.shape[0]], strict=True):
        name = f"{path}self_attention.{part}_proj"
        if suffix == "weight":
            yield linear(name, info, rows(begin, end))
        else:
            yield plain(f"{name}.{suffix}", [info], rows(begin, end))


def _falcon_norm(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Rename the only norm of a layer, or the first of two: that of the feed-forward part."""
    two = info.name.replace("attn_norm", "attn_norm_2") in keys.model.tensors
    yield plain(f"{path}{'ln_mlp' if two else 'input_layernorm'}.{suffix}", [info])


def _head_norms(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Split a matrix into one norm per head."""
    part = "q" if "attn_q" in info.name else "k"
    for head in range(info.shape[0]):
        name = f"{path}self_attn.{part}_layernorm.norms.{head}.{suffix}"
        yield plain(name, [info], lambda tensors, head=head: tensors[0][head])


def _latent(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Join the matrices that expand the latent: keys [heads, rank, nope], values [heads, value,
    rank].
    """
    values = _sibling(info, keys, "attn_v_b")
    heads, rank, nope = info.shape
    count = heads * (nope + values.shape[1])

    def change(tensors: Sequence[Tensor]) -> Tensor:
        key, value = tensors
        return torch.cat([key.transpose(1, 2), value], 1).flatten(0, 1)

    yield joined(f"{path}self_attn.kv_b_proj", (info, values), (count, rank), change)


def _nothing(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Return no entries: the tensor is part of another tensor's entry."""
    return iter(())


def _paired_bias(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Rename gate projections of experts. Weights stay separate; biases are interleaved with those
    of the up projections, as in checkpoints.
    """
    if suffix == "weight":
        yield linear(f"{path}mlp.experts.gate_proj", info)
        return
    up = _sibling(info, keys, "ffn_up_exps")
    name = f"{path}mlp.experts.gate_up_proj_bias"
    yield plain(name, [info, up], lambda tensors: torch.stack(tuple(tensors), -1).flatten(-2))


def _up_bias(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    if suffix == "weight":
        yield linear(f"{path}mlp.experts.up_proj", info)


def _down_bias(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    if suffix == "weight":
        yield linear(f"{path}mlp.experts.down_proj", info)
    else:
        yield plain(f"{path}mlp.experts.down_proj_bias", [info])


def _one_row(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Turn the gate of the shared expert, a vector, into a matrix with one row."""
    yield linear(f"{path}mlp.shared_expert_gate", info, lambda tensors: tensors[0].reshape(1, -1))


def _convolution(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    name = f"{path}mixer.conv1d.{suffix}"
    if suffix == "bias":
        yield plain(name, [info])
    else:
        yield plain(name, [info], lambda tensors: tensors[0].reshape(len(tensors[0]), 1, -1))


def _decay(keys: Keys, info: TensorInfo, path: str, suffix: str) -> Iterator[Entry]:
    """Convert -exp(A_log) to A_log."""
    yield plain(f"{path}mixer.A_log", [info], lambda tensors: (-tensors[0]).log())


_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}


def _mixtral() -> Layout:
    at = "block_sparse_moe"
    moe = {
        "ffn_gate_inp": f"{at}.gate",
        "ffn_gate_exps": f"{at}.experts.w1",
        "ffn_up_exps": f"{at}.experts.w3",
        "ffn_down_exps": f"{at}.experts.w2",
    }
    return Layout({**_BLOCK, **moe}, permuted=_HEADS)


def _granite() -> Layout:
    at = "block_sparse_moe"
    moe = {
        "ffn_gate_inp": f"{at}.router.layer",
        "ffn_gate_exps": f"{at}.experts.gate_proj",
        "ffn_up_exps": f"{at}.experts.up_proj",
        "ffn_down_exps": f"{at}.experts.down_proj",
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
    return Layout({**_BLOCK, **moe}, permuted=_HEADS)


def _qwen_moe() -> Layout:
    shared = {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
    return Layout({**_BLOCK, **_EXPERTS, **shared}, special={"ffn_gate_inp_shexp": _one_row})


_GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DEEPSEEK = {
    **_BLOCK,
    **_EXPERTS,
    **_SHARED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_GLM_MOE = {
    **_BLOCK, **_EXPERTS, **_SHARED, "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_GLM4 = {
    **_FUSED,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GPT_OSS = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "=self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_FALCON = {
    "attn_norm_2": "ln_attn",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_MAMBA = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_d": "=mixer.D",
    "ssm_out": "mixer.out_proj",
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_qkv": "attention.self.qkv",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}


def _root(name: str, embeddings: str, norm: str) -> Mapping[str, str]:
    return {
        "token_embd": f"{name}.{embeddings}",
        "output_norm": f"{name}.{norm}",
        "output": "lm_head",
    }


#: Layouts by `general.architecture`.
ARCHITECTURES: Mapping[str, Layout] = {
    "llama": _mixtral(),
    "mistral3": Layout(_BLOCK, permuted=_HEADS),
    "qwen2": Layout(_BLOCK),
    "qwen3": Layout(_BLOCK),
    "qwen2moe": _qwen_moe(),
    "qwen3moe": Layout({**_BLOCK, **_EXPERTS}),
    "gemma": Layout(_BLOCK, less=1.0),
    "gemma2": Layout({**_BLOCK, **_GEMMA_NORMS}, less=1.0),
    "gemma3": Layout({**_BLOCK, **_GEMMA_NORMS}, less=1.0),
    "phi3": Layout(_FUSED),
    "deepseek2": Layout(_DEEPSEEK, special={"attn_k_b": _latent, "attn_v_b": _nothing}),
    "gpt-oss": Layout(
        _GPT_OSS,
        special={
            "ffn_gate_exps": _paired_bias,
            "ffn_up_exps": _up_bias,
            "ffn_down_exps": _down_bias,
        },
    ),
    "chatglm": Layout(_FUSED),
    "glm4": Layout(_GLM4),
    "glm4moe": Layout(_GLM_MOE),
    "granite": _granite(),
    "granitemoe": _granite(),
    "stablelm": Layout(_BLOCK, special={"attn_q_norm": _head_norms, "attn_k_norm": _head_norms}),
    "falcon": Layout(
        _FALCON,
        top=_root("transformer", "word_embeddings", "ln_f"),
        prefix="transformer.layers.",
        special={"attn_qkv": _falcon_qkv, "attn_norm": _falcon_norm},
    ),
    "gpt2": Layout(
        _GPT2,
        top={**_root("transformer", "wte", "ln_f"), "position_embd": "transformer.wpe"},
        prefix="transformer.layers.",
    ),
    "mamba": Layout(
        _MAMBA,
        top=_root("backbone", "embeddings", "norm_f"),
        prefix="backbone.layers.",
        special={"ssm_conv1d": _convolution, "ssm_a": _decay},
    ),
    "bert": Layout(_BERT, top=_BERT_TOP, prefix="encoder.layer."),
}
