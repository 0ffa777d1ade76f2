"""Translate Mistral's params.json to the configuration of the model family that runs it.

The keys are those of mistral-inference (`TransformerArgs`, `MambaArgs`) and of Mistral's later
releases: `yarn`, `llama_4_scaling`, `moe`, `quantization`, `vision_encoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.errors import CheckpointError, UnsupportedError

__all__ = ["configuration"]

#: Mistral's key -> ours; the first six are required.
_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_NEEDED = 6
#: Keys of the table `moe` of models with shared experts.
_MOE = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
#: Maximum length for models whose files do not state one.
_POSITIONS = 128_000
_THETA = 10_000.0


def configuration(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the equivalent of config.json. where: the file, for error messages.

    Raises CheckpointError for missing or invalid keys, UnsupportedError for models that no
    installed family runs.
    """
    _check_kind(params, where)
    missing = [key for key in list(_KEYS)[:_NEEDED] if key not in params]
    if missing:
        raise CheckpointError(f"{where}: missing key: {missing[0]}")
    config = {ours: params[key] for key, ours in _KEYS.items() if params.get(key) is not None}
    length = params.get("max_position_embeddings") or params.get("max_seq_len")
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": params.get("activation", "silu"),
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "max_position_embeddings": length or _POSITIONS,
        "torch_dtype": params.get("dtype", "bfloat16"),
        "rope_theta": float(params.get("rope_theta") or _THETA),
        **_window(params.get("sliding_window"), config["num_hidden_layers"], where),
    }
    moe = _table(params, "moe", where)
    if moe and params.get("kv_lora_rank"):
        config |= _latent(params, moe, where)
    elif moe:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        for key, ours in (
            ("num_experts", "num_local_experts"),
            ("num_experts_per_tok", "num_experts_per_tok"),
        ):
            if key not in moe:
                raise CheckpointError(f"{where}: missing key: moe.{key}")
            config[ours] = moe[key]
    config |= _rope(params, config, where)
    config |= _quantization(_table(params, "quantization", where), where)
    vision = _table(params, "vision_encoder", where)
    return _around(config, vision) if vision else config


def _around(config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model that sees, around that of its text model."""
    return {
        "architectures": ["PixtralForConditionalGeneration"],
        "model_type": "pixtral",
        "torch_dtype": config["torch_dtype"],
        "text_config": dict(config),
        "vision_config": dict(vision),
    }


def _check_kind(params: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError unless the model is a plain decoder."""
    moe = params.get("moe")
    shared = isinstance(moe, Mapping) and moe.get("num_shared_experts")
    latent = params.get("kv_lora_rank") or params.get("qk_nope_head_dim")
    advice = "serve the checkpoint's own config.json with --load-format safetensors"
    if params.get("model_type", "transformer") not in ("transformer", "mistral", None):
        raise UnsupportedError(
            f"{where}: not supported: model_type {params['model_type']!r}; {advice}"
        )
    if bool(shared) != bool(latent):
        raise UnsupportedError(
            f"{where}: not supported: latent attention without shared experts, or the reverse; "
            f"{advice}"
        )
    if params.get("multimodal") or params.get("audio_encoder"):
        raise UnsupportedError(f"{where}: not supported: audio models; {advice}")
    if params.get("causal") is False:
        raise UnsupportedError(f"{where}: not supported: causal is false")


def _latent(params: Mapping[str, Any], moe: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of Mistral Large 3: latent attention, shared and routed experts."""
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    settings = {key: params.get(key) for key in sizes}
    settings |= {ours: moe.get(key) for key, ours in _MOE.items()}
    absent = [key for key, value in settings.items() if value is None and key != "q_lora_rank"]
    if absent:
        theirs = {ours: f"moe.{key}" for key, ours in _MOE.items()}
        raise CheckpointError(f"{where}: missing key: {theirs.get(absent[0], absent[0])}")
    if moe.get("route_every_n", 1) != 1:
        raise UnsupportedError(f"{where}: not supported: moe.route_every_n above 1")
    names = {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "mistral4"}
    return {**settings, **names, "head_dim": None, "norm_topk_prob": True}


def _table(params: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = params.get(key) or {}
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{where}: {key}: must be a table")
    return table


def _window(windows: Any, layers: int, where: str) -> dict[str, Any]:
    """Return layer types for one window for all layers, or a repeating list (null: no window)."""
    if not isinstance(windows, list):
        return {"sliding_window": windows}
    sizes = {size for size in windows if size is not None}
    if not windows or len(sizes) > 1 or layers % len(windows):
        raise CheckpointError(
            f"{where}: sliding_window: {windows}: must be windows of one size that repeat in "
            f"{layers} layers"
        )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    settings = {"layer_types": kinds * (layers // len(windows)), "sliding_window": None}
    return {**settings, "sliding_window": sizes.pop()} if sizes else settings


def _rope(params: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return settings for extended rotary embeddings and position-dependent query scales."""
    yarn, growth = _table(params, "yarn", where), _table(params, "llama_4_scaling", where)
    latent = config["architectures"] == ["MistralLarge3ForCausalLM"]
    if not yarn and not growth:
        return {}
    unknown = [key for key in yarn if key not in _YARN and key != "apply_scale"]
    if unknown:
        raise CheckpointError(f"{where}: unknown key: yarn.{unknown[0]}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if yarn:
        rope |= {"rope_type": "yarn", **{_YARN[key]: yarn[key] for key in _YARN if key in yarn}}
        if latent or not yarn.get("apply_scale", True):
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if not growth:
        return {"rope_parameters": rope}
    start = growth.get("original_max_position_embeddings")
    if "beta" not in growth or start is None:
        raise CheckpointError(
            f"{where}: llama_4_scaling: beta and original_max_position_embeddings are required"
        )
    if not (latent or config["architectures"] == ["MistralForCausalLM"]) or not yarn:
        raise UnsupportedError(
            f"{where}: not supported: llama_4_scaling without yarn or with experts"
        )
    if start != rope.get("original_max_position_embeddings"):
        raise UnsupportedError(f"{where}: llama_4_scaling and yarn differ in their trained length")
    rope["llama_4_scaling_beta"] = growth["beta"]
    if latent:
        return {"rope_parameters": rope}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": rope,
    }


def _quantization(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not table:
        return {}
    method = str(table.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {"quantization_config": {**table, "quant_method": method}}
    if table.get("qformat_weight") != "fp8_e4m3":
        raise UnsupportedError(
            f"{where}: quantization: {dict(table)}: supported are qformat_weight fp8_e4m3 and "
            "compressed-tensors"
        )
    scheme = table.get("qscheme_act")
    if scheme not in (None, "TENSOR", "NO_SCALES"):
        raise UnsupportedError(
            f"{where}: quantization.qscheme_act: {scheme!r}: must be TENSOR or NO_SCALES"
        )
    static = scheme != "NO_SCALES"
    return {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "static" if static else "dynamic",
        }
    }
