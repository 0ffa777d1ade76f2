"""Build the equivalent of config.json from the metadata of a GGUF file.

The keys are those of gguf-py/gguf/constants.py. Their meaning and defaults per architecture follow
llama.cpp's src/models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from modulm.errors import CheckpointError
from modulm_quant_gguf.architectures import ARCHITECTURES
from modulm_quant_gguf.keys import Keys

__all__ = ["configuration"]

Table = dict[str, Any]

_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def configuration(keys: Keys) -> Table:
    """Return the configuration, with `architectures`. Raises CheckpointError for unknown ones."""
    described = _DESCRIBED.get(keys.architecture)
    if described is None:
        known = ", ".join(sorted(ARCHITECTURES))
        name = f"{keys.model.path}: general.architecture: {keys.architecture!r}"
        raise CheckpointError(f"{name} is not supported yet; supported: {known}")
    table = {**_common(keys), **described(keys)}
    if "num_experts_per_tok" in table and not table["num_experts_per_tok"]:
        raise keys.error("expert_used_count", "must not be 0")
    return table


def _common(keys: Keys) -> Table:
    vocabulary = keys.tensor("token_embd.weight").shape[0]
    table: Table = {
        "vocab_size": vocabulary,
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.layers,
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in keys.model.tensors,
        "dtype": _dtype(keys),
    }
    for name, key in _TOKENS.items():
        token = keys.model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(token) is int:
            table[key] = token
    return table


def _dtype(keys: Keys) -> str:
    """Return the dtype to compute in: that of plain weights, else bfloat16."""
    kinds = {info.kind.name for info in keys.model.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _decoder(keys: Keys) -> Table:
    """Settings of attention and of a gated feed-forward part."""
    table: Table = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": keys.heads("head_count"),
        "num_key_value_heads": keys.heads("head_count_kv"),
        "head_dim": keys.head_size,
        "rope_parameters": _rope(keys, keys.head_size),
    }
    for key, stored in (
        ("rms_norm_eps", "layer_norm_rms_epsilon"),
        ("layer_norm_eps", "layer_norm_epsilon"),
    ):
        if keys.has(f"attention.{stored}"):
            table[key] = keys.real(f"attention.{stored}")
    return table


def _rope(keys: Keys, head_size: int) -> Table:
    """Settings of rotary positions; factors stored as tensors become those of longrope."""
    table: Table = {"rope_theta": keys.real("rope.freq_base", 10000.0), "rope_type": "default"}
    size = keys.integer("rope.dimension_count", head_size)
    if size != head_size:
        table["partial_rotary_factor"] = size / head_size
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.error("rope.scaling.type", f"{kind!r} is not supported yet")
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    if kind in ("linear", "yarn"):
        factor = keys.real("rope.scaling.factor", 1.0)
        table |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        table["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if keys.has(f"rope.scaling.yarn_{key}"):
                table[key] = keys.real(f"rope.scaling.yarn_{key}")
        if keys.has("rope.scaling.attn_factor"):
            table["attention_factor"] = keys.real("rope.scaling.attn_factor") * (
                0.1 * math.log(table["factor"]) + 1.0
            )
    factors = _factors(keys, size)
    if factors:
        table |= factors
        table["original_max_position_embeddings"] = original
        table["attention_factor"] = keys.real("rope.scaling.attn_factor", 1.0)
    return table


def _factors(keys: Keys, size: int) -> Table:
    """Return the frequency divisors, if the file stores them as tensors."""
    tensors = keys.model.tensors
    short, long = "rope_factors_short.weight", "rope_factors_long.weight"
    if short not in tensors or long not in tensors:
        short = long = "rope_freqs.weight"
    if short not in tensors:
        return {}
    factors = {}
    for name, stored in (("short_factor", short), ("long_factor", long)):
        info = keys.tensor(stored)
        if info.shape != (size // 2,):
            raise CheckpointError(
                f"{info.file}: {stored}: expected {size // 2} factors, found {list(info.shape)}"
            )
        factors[name] = keys.model.numbers(stored).tolist()
    return {"rope_type": "longrope", **factors}


def _architecture(name: str, model_type: str) -> Table:
    return {"architectures": [name], "model_type": model_type}


def _biased(keys: Keys) -> Table:
    return {
        "attention_bias": keys.has_tensor("blk.{}.attn_q.bias")
        or keys.has_tensor("blk.{}.attn_qkv.bias"),
        "mlp_bias": keys.has_tensor("blk.{}.ffn_up.bias"),
    }


def _llama(keys: Keys) -> Table:
    """Llama and Mistral share an architecture in GGUF; so does Mixtral, which has experts."""
    table = {**_decoder(keys), **_biased(keys)}
    if keys.integer("expert_count", 0):
        experts = {
            "num_local_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
        }
        return {**table, **experts, **_architecture("MixtralForCausalLM", "mixtral")}
    return {**table, **_architecture("LlamaForCausalLM", "llama")}


def _mistral(keys: Keys) -> Table:
    return {
        **_decoder(keys),
        "sliding_window": None,
        **_architecture("MistralForCausalLM", "mistral"),
    }


def _simple(name: str, model_type: str) -> Callable[[Keys], Table]:
    return lambda keys: {**_decoder(keys), **_architecture(name, model_type)}


def _qwen2(keys: Keys) -> Table:
    return {
        **_decoder(keys),
        "use_sliding_window": False,
        **_architecture("Qwen2ForCausalLM", "qwen2"),
    }


def _qwen_experts(keys: Keys) -> Table:
    dense = [
        i for i in range(keys.layers) if f"blk.{i}.ffn_gate_inp.weight" not in keys.model.tensors
    ]
    inner = keys.tensor(f"blk.{_first_sparse(keys)}.ffn_gate_exps.weight").shape[1]
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": False,
        # Width of dense layers; files of models without such layers may lack it.
        "intermediate_size": keys.integer("feed_forward_length", inner) or inner,
    }


def _first_sparse(keys: Keys) -> int:
    tensors = keys.model.tensors
    sparse = (i for i in range(keys.layers) if f"blk.{i}.ffn_gate_inp.weight" in tensors)
    return next(sparse, 0)


def _qwen2_moe(keys: Keys) -> Table:
    shared = keys.tensor(f"blk.{_first_sparse(keys)}.ffn_up_shexp.weight").shape[0]
    more = {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    name = _architecture("Qwen2MoeForCausalLM", "qwen2_moe")
    return {**_decoder(keys), **_qwen_experts(keys), **more, **name}


def _qwen3_moe(keys: Keys) -> Table:
    name = _architecture("Qwen3MoeForCausalLM", "qwen3_moe")
    return {**_decoder(keys), **_qwen_experts(keys), "norm_topk_prob": True, **name}


def _gemma_scalar(keys: Keys, largest: int) -> float:
    """Return the number whose root divides scores: the head size, except in the largest model."""
    if keys.layers == largest:
        return keys.integer("embedding_length") / keys.heads("head_count")
    return keys.head_size


def _gemma2(keys: Keys) -> Table:
    return {
        **_decoder(keys),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma_scalar(keys, 46),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        **_architecture("Gemma2ForCausalLM", "gemma2"),
    }


def _gemma3(keys: Keys) -> Table:
    """Five layers with a sliding window per global layer, which has a larger rotary base."""
    table = _decoder(keys)
    pattern = keys.integer("attention.sliding_window_pattern", 6)
    kinds = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
        for i in range(keys.layers)
    ]
    whole = {**table.pop("rope_parameters")}
    whole["rope_theta"] = keys.real("rope.freq_base", 1e6)
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 1e4)}
    cap = keys.real("final_logit_softcapping", 0.0)
    return {
        **table,
        "layer_types": kinds,
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        "sliding_window": keys.integer("attention.sliding_window", 1024),
        "query_pre_attn_scalar": _gemma_scalar(keys, 62),
        "final_logit_softcapping": cap or None,
        **_architecture("Gemma3ForCausalLM", "gemma3_text"),
    }


def _phi3(keys: Keys) -> Table:
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    window = keys.integer("attention.sliding_window", 0)
    return {
        **_decoder(keys),
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
        **_architecture("Phi3ForCausalLM", "phi3"),
    }


def _routed(keys: Keys) -> Table:
    """Settings of fine-grained experts with shared experts, after some dense layers."""
    dense = keys.integer("leading_dense_block_count", 0)
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0) or None,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": dense,
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0) or 1.0,
    }


def _deepseek2(keys: Keys) -> Table:
    """DeepSeek V2 and V3 share an architecture in GGUF; V3 scores experts with sigmoids."""
    turned = keys.integer("rope.dimension_count")
    usual = keys.integer("attention.key_length"), keys.integer("attention.value_length")
    size = keys.integer("attention.key_length_mla", usual[0])
    rope = _rope(keys, turned)
    if keys.has("rope.scaling.yarn_log_multiplier"):
        scale = keys.real("rope.scaling.yarn_log_multiplier") * 10
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    ranks = {"kv_lora_rank": keys.integer("attention.kv_lora_rank"), "q_lora_rank": None}
    if keys.has("attention.q_lora_rank"):
        ranks["q_lora_rank"] = keys.integer("attention.q_lora_rank") or None
    third = keys.integer("expert_gating_func", 1) == 2
    table = {
        **_decoder(keys),
        **_routed(keys),
        **ranks,
        "head_dim": None,
        "num_key_value_heads": keys.heads("head_count"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": size - turned,
        "v_head_dim": keys.integer("attention.value_length_mla", usual[1]),
        "rope_parameters": rope,
    }
    if third:
        return {**table, **_architecture("DeepseekV3ForCausalLM", "deepseek_v3")}
    method = "group_limited_greedy" if table["n_group"] > 1 else "greedy"
    return {**table, "topk_method": method, **_architecture("DeepseekV2ForCausalLM", "deepseek_v2")}


def _gpt_oss(keys: Keys) -> Table:
    table = _decoder(keys)
    table["rope_parameters"]["truncate"] = False
    return {
        **table,
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "attention_bias": True,
        **_architecture("GptOssForCausalLM", "gpt_oss"),
    }


def _glm(name: str, model_type: str) -> Callable[[Keys], Table]:
    return lambda keys: {
        **_decoder(keys),
        **_biased(keys),
        "mlp_bias": False,
        **_architecture(name, model_type),
    }


def _glm_moe(keys: Keys) -> Table:
    drafts = keys.integer("nextn_predict_layers", 0)
    return {
        **_decoder(keys),
        **_routed(keys),
        **_biased(keys),
        "mlp_bias": False,
        "num_hidden_layers": keys.layers - drafts,
        "num_nextn_predict_layers": drafts,
        "use_qk_norm": keys.has_tensor("blk.{}.attn_q_norm.weight"),
        **_architecture("Glm4MoeForCausalLM", "glm4_moe"),
    }


def _granite(keys: Keys) -> Table:
    size = keys.head_size
    table = {
        **_decoder(keys),
        **_biased(keys),
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "attention_multiplier": keys.real("attention.scale", size**-0.5),
        "logits_scaling": keys.real("logit_scale", 1.0),
    }
    if not keys.integer("expert_count", 0):
        return {**table, **_architecture("GraniteForCausalLM", "granite")}
    table["num_local_experts"] = keys.integer("expert_count")
    table["num_experts_per_tok"] = keys.integer("expert_used_count")
    if not keys.has_tensor("blk.{}.ffn_up_shexp.weight"):
        return {**table, **_architecture("GraniteMoeForCausalLM", "granitemoe")}
    table["shared_intermediate_size"] = keys.tensor("blk.0.ffn_up_shexp.weight").shape[0]
    return {**table, **_architecture("GraniteMoeSharedForCausalLM", "granitemoeshared")}


def _stablelm(keys: Keys) -> Table:
    table = _decoder(keys)
    # This family reads the rotary fraction from the top level.
    part = table["rope_parameters"].get("partial_rotary_factor", 1.0)
    return {
        **table,
        "partial_rotary_factor": part,
        "use_qkv_bias": keys.has_tensor("blk.{}.attn_q.bias"),
        "qk_layernorm": keys.has_tensor("blk.{}.attn_q_norm.weight"),
        "use_parallel_residual": not keys.has_tensor("blk.{}.ffn_norm.weight"),
        **_architecture("StableLmForCausalLM", "stablelm"),
    }


def _falcon(keys: Keys) -> Table:
    table, shared = _decoder(keys), keys.heads("head_count_kv")
    return {
        **table,
        "ffn_hidden_size": table.pop("intermediate_size"),
        "num_kv_heads": shared,
        "multi_query": shared == 1,
        "new_decoder_architecture": shared > 1,
        "num_ln_in_parallel_attn": 2 if keys.has_tensor("blk.{}.attn_norm_2.weight") else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        **_architecture("FalconForCausalLM", "falcon"),
    }


def _gpt2(keys: Keys) -> Table:
    return {
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": keys.heads("head_count"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        **_architecture("GPT2LMHeadModel", "gpt2"),
    }


def _mamba(keys: Keys) -> Table:
    inner, hidden = keys.integer("ssm.inner_size"), keys.integer("embedding_length")
    if inner % hidden:
        raise keys.error("ssm.inner_size", f"{inner} is not a multiple of {hidden}")
    return {
        "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "time_step_rank": keys.integer("ssm.time_step_rank"),
        "expand": inner // hidden,
        "use_bias": keys.has_tensor("blk.{}.ssm_in.bias"),
        "use_conv_bias": keys.has_tensor("blk.{}.ssm_conv1d.bias"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        **_architecture("MambaForCausalLM", "mamba"),
    }


def _bert(keys: Keys) -> Table:
    return {
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": keys.heads("head_count"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "type_vocab_size": keys.tensor("token_types.weight").shape[0],
        **_architecture("BertModel", "bert"),
    }


_DESCRIBED: Mapping[str, Callable[[Keys], Table]] = {
    "llama": _llama,
    "mistral3": _mistral,
    "qwen2": _qwen2,
    "qwen3": _simple("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gemma": _simple("GemmaForCausalLM", "gemma"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "chatglm": _glm("GlmForCausalLM", "glm"),
    "glm4": _glm("Glm4ForCausalLM", "glm4"),
    "glm4moe": _glm_moe,
    "granite": _granite,
    "granitemoe": _granite,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "mamba": _mamba,
    "bert": _bert,
}
