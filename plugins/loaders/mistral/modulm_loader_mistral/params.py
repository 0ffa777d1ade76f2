"""params.json of Mistral as the configuration of the family that runs it.

Keys as in mistral-inference (`TransformerArgs`, `MambaArgs`) and in what Mistral publishes since:
`yarn`, `llama_4_scaling`, `moe`, `quantization`, `vision_encoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.errors import CheckpointError, UnsupportedError

__all__ = ["configuration"]

#: Mistral's key -> ours; the first six must be there.
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
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
#: Of models whose files do not say a length.
_POSITIONS = 128_000
_THETA = 10_000.0


def configuration(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What config.json would say. where: the file, for messages.

    Raises CheckpointError for keys that are missing or of no use, UnsupportedError for models
    that no family here runs.
    """
    _check_kind(params, where)
    missing = [key for key in list(_KEYS)[:_NEEDED] if key not in params]
    if missing:
        raise CheckpointError(f"{where}: {missing[0]} is needed")
    found = {ours: params[key] for key, ours in _KEYS.items() if params.get(key) is not None}
    length = params.get("max_position_embeddings") or params.get("max_seq_len")
    found |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": params.get("activation", "silu"),
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "max_position_embeddings": length or _POSITIONS,
        "torch_dtype": params.get("dtype", "bfloat16"),
        "rope_theta": float(params.get("rope_theta") or _THETA),
        **_window(params.get("sliding_window"), found["num_hidden_layers"], where),
    }
    moe = _table(params, "moe", where)
    if moe:
        found |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        for key, ours in (
            ("num_experts", "num_local_experts"),
            ("num_experts_per_tok", "num_experts_per_tok"),
        ):
            if key not in moe:
                raise CheckpointError(f"{where}: moe.{key} is needed")
            found[ours] = moe[key]
    found |= _rope(params, found, where)
    return {**found, **_quantization(_table(params, "quantization", where), where)}


def _check_kind(params: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedError for what is no plain decoder."""
    moe = params.get("moe")
    shared = isinstance(moe, Mapping) and moe.get("num_shared_experts")
    advice = "serve the checkpoint's own config.json with --load-format safetensors"
    if params.get("model_type", "transformer") not in ("transformer", "mistral", None):
        raise UnsupportedError(f"{where}: model_type {params['model_type']!r}: {advice}")
    if shared or params.get("kv_lora_rank") or params.get("qk_nope_head_dim"):
        raise UnsupportedError(f"{where}: latent attention and shared experts: {advice}")
    if params.get("multimodal") or params.get("audio_encoder"):
        raise UnsupportedError(f"{where}: an audio model: {advice}")
    if params.get("causal") is False:
        raise UnsupportedError(f"{where}: causal is false: no decoder")


def _table(params: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = params.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: {key}: a table is needed")
    return found


def _window(given: Any, layers: int, where: str) -> dict[str, Any]:
    """One window for all layers, or a list of windows that repeats, null for none."""
    if not isinstance(given, list):
        return {"sliding_window": given}
    sizes = {size for size in given if size is not None}
    if not given or len(sizes) > 1 or layers % len(given):
        raise CheckpointError(
            f"{where}: sliding_window: {given}: windows of one size that repeat in {layers} layers"
        )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in given]
    found = {"layer_types": kinds * (layers // len(given)), "sliding_window": None}
    return {**found, "sliding_window": sizes.pop()} if sizes else found


def _rope(params: Mapping[str, Any], found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rotary angles beyond the trained length, and queries that grow with it."""
    yarn, growth = _table(params, "yarn", where), _table(params, "llama_4_scaling", where)
    if not yarn and not growth:
        return {}
    unknown = [key for key in yarn if key not in _YARN and key != "apply_scale"]
    if unknown:
        raise CheckpointError(f"{where}: yarn.{unknown[0]}: no such key is known")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": found["rope_theta"]}
    if yarn:
        rope |= {"rope_type": "yarn", **{_YARN[key]: yarn[key] for key in _YARN if key in yarn}}
        if not yarn.get("apply_scale", True):
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if not growth:
        return {"rope_parameters": rope}
    start = growth.get("original_max_position_embeddings")
    if "beta" not in growth or start is None:
        raise CheckpointError(
            f"{where}: llama_4_scaling: beta and original_max_position_embeddings are needed"
        )
    if found["architectures"] != ["MistralForCausalLM"] or not yarn:
        raise UnsupportedError(f"{where}: llama_4_scaling without yarn, or with experts")
    if start != rope.get("original_max_position_embeddings"):
        raise UnsupportedError(f"{where}: llama_4_scaling and yarn differ in their trained length")
    rope["llama_4_scaling_beta"] = growth["beta"]
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
            f"{where}: quantization: {dict(table)}: read are qformat_weight fp8_e4m3 and "
            "compressed-tensors"
        )
    scheme = table.get("qscheme_act")
    if scheme not in (None, "TENSOR", "NO_SCALES"):
        raise UnsupportedError(
            f"{where}: quantization.qscheme_act: {scheme!r}: TENSOR or NO_SCALES"
        )
    static = scheme != "NO_SCALES"
    return {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "static" if static else "dynamic",
        }
    }
