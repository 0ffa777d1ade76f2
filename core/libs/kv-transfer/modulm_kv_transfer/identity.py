"""Digest of everything besides tokens that keys and values depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["encoder_facts", "engine_facts", "facts_digest", "model_digest"]

#: Flags that change keys, values or the cache layout.
_FLAGS = (
    "activation_quantization", "attention_backend", "block_size", "code_revision",
    "cp_kv_cache_interleave_size", "decode_context_parallel_size", "device",
    "disable_sliding_window", "dtype", "hf_overrides", "kernels", "kv_cache_dtype",
    "kv_cache_dtype_skip_layers", "load_format", "max_model_len", "model_class_overrides",
    "model_impl", "model_loader_extra_config", "pipeline_layer_partition",
    "pipeline_parallel_size", "prefix_caching_hash_algo", "quantization", "quantization_config",
    "revision", "seed", "tensor_parallel_size",
)  # fmt: skip
#: Size of the samples read at the beginning, middle and end of a file.
_PIECE = 1 << 16


def model_digest(config: Any, plugins: Any) -> str:
    """Return a digest of the checkpoint and of flags that affect its caches: 32 hex digits.

    Files are identified by three samples of their content, size and time. Raises CheckpointError.
    """
    from modulm.loading import open_checkpoint

    checkpoint = open_checkpoint(config, plugins)
    flags = {name: str(config.value(name)) for name in _FLAGS}
    described = {"config": checkpoint.config, "flags": flags, "modulm": version("modulm")}
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode())
    path = Path(checkpoint.path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file() and file.suffix not in (".md", ".txt", ".jinja"):
            digest.update(_sample(file))
    return digest.hexdigest()[:32]


#: Flags that must agree between two engines that exchange blocks.
_SHARED = (
    "dtype", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "block_size", "quantization",
    "quantization_config", "activation_quantization", "disable_sliding_window", "model_impl",
    "prefix_caching_hash_algo", "attention_backend", "mamba_cache_mode", "mamba_block_size",
    "tensor_parallel_size", "pipeline_parallel_size", "pipeline_layer_partition",
    "decode_context_parallel_size", "cp_kv_cache_interleave_size",
)  # fmt: skip


def engine_facts(config: Any, plugins: Any) -> dict[str, str]:
    """Return what two engines must have in common to exchange blocks, by flag.

    `model` is a digest of config.json and of samples of the weights, whatever their time and
    folder. Raises CheckpointError.
    """
    from modulm.loading import open_checkpoint

    checkpoint = open_checkpoint(config, plugins)
    facts = {name: str(config.value(name)) for name in _SHARED}
    described: dict[str, Any] = {"config": checkpoint.config}
    if config.value("load_format") == "dummy":
        described["seed"] = config.value("seed")
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode())
    path = Path(checkpoint.path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file() and file.suffix not in (".md", ".txt", ".jinja", ".json"):
            digest.update(_sample(file, timed=False))
    return {"version": version("modulm"), "model": digest.hexdigest()[:32], **facts}


#: Flags that must agree between two engines that exchange encoder outputs.
_ENCODER = (
    "device", "dtype", "quantization", "quantization_config", "activation_quantization",
    "model_impl", "mm_processor_kwargs",
)  # fmt: skip
#: Parts of names of a checkpoint's files that say how media are processed.
_PROCESSING = ("processor", "feature_extractor")


def encoder_facts(config: Any, plugins: Any) -> dict[str, str]:
    """Return what encoder outputs depend on besides the item, by flag.

    `tensor_parallel_size` is 1 if each rank has whole encoders, since it then changes no bits.
    Raises CheckpointError.
    """
    from modulm.loading import open_checkpoint

    checkpoint = open_checkpoint(config, plugins)
    facts = {name: str(config.value(name)) for name in _ENCODER}
    split = config.value("mm_encoder_tp_mode") == "weights"
    facts["tensor_parallel_size"] = str(config.value("tensor_parallel_size") if split else 1)
    path = Path(checkpoint.path)
    digest = hashlib.blake2b(engine_facts(config, plugins)["model"].encode())
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if file.suffix == ".json" and any(part in file.name for part in _PROCESSING):
            digest.update(file.name.encode() + file.read_bytes())
    return {"version": version("modulm"), "model": digest.hexdigest()[:32], **facts}


def facts_digest(facts: Mapping[str, str]) -> str:
    """Return a digest of facts: 32 hex digits."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _sample(file: Path, *, timed: bool = True) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as opened:
        time = file.stat().st_mtime_ns if timed else 0
        pieces = [f"{file.name} {size} {time}".encode()]
        for offset in (0, size // 2, max(0, size - _PIECE)):
            opened.seek(offset)
            pieces.append(opened.read(_PIECE))
    return b"".join(pieces)
