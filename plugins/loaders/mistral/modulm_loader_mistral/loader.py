"""Checkpoints as Mistral publishes them: params.json, consolidated*.safetensors, tekken.json.

The tensors are those of Llama's reference code: queries and keys have the two numbers that are
turned together side by side, where families here have them half a head apart; so their rows are
put in that order. What belongs to a vision encoder is left out: text alone is served. The tokenizer
is the package `modulm-tokenizer-mistral`'s.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError
from modulm_loader_mistral.params import configuration
from modulm_tensor_files import SafetensorsFolder

__all__ = ["MistralLoader"]

log = logging.getLogger("modulm.loader.mistral")

_PARAMS, _WEIGHTS = "params.json", "consolidated*.safetensors"
_VISION = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.experts\.(\d+)\.(w[123])")
_ROUTERS = ("feed_forward.gate", "block_sparse_moe.gate", "gate")
_BARE_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])")
_SCALES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
#: Which keys' heads are turned.
_TURNED = {"q_proj": "n_heads", "k_proj": "n_kv_heads"}


class MistralLoader(SafetensorsFolder):
    """`--load-format mistral`; by itself where there is no config.json."""

    name = "mistral"
    api = 1
    INDEX = "consolidated.safetensors.index.json"

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if not (path / _PARAMS).exists() or (path / "config.json").exists():
            return None
        return f"there are {_PARAMS} and {_WEIGHTS}" if any(path.glob(_WEIGHTS)) else None

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """params.json. Raises CheckpointError."""
        file = self.path / _PARAMS
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: {error}") from error
        if not isinstance(table, dict):
            raise CheckpointError(f"{file}: a JSON object is needed")
        inner = table.pop("text_config", None) or {}
        return {**table, **inner} if isinstance(inner, dict) else table

    def configuration(self) -> Mapping[str, object]:
        return configuration(self.params, str(self.path / _PARAMS))

    def files(self) -> list[str]:
        found = sorted(file.name for file in self.path.glob(_WEIGHTS))
        if not found:
            raise CheckpointError(f"{self.path}: no {_WEIGHTS} is there")
        return found

    def headers(self, file: str) -> Iterable[StoredTensor]:
        left_out = 0
        for stored in super().headers(file):
            if stored.name.startswith(_VISION):
                left_out += 1
            else:
                yield stored
        if left_out:
            log.warning("%s: %d tensors of the vision encoder are left out", file, left_out)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Mistral's name -> the family's."""
        found = super().index()
        return {name: _renamed(name, self.path) for name in found}

    def index(self) -> Mapping[str, StoredTensor]:
        found = super().index()
        return {self._names[name]: evolve(found[name], name=self._names[name]) for name in found}

    def by_file(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, stored in super().index().items():
            found.setdefault(stored.file, []).append(name)
        return found

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().read():
            ours = self._names[name]
            part = ours.rpartition(".")[0].rpartition(".")[2]
            yield ours, self._turned(part, tensor) if part in _TURNED else tensor

    def _turned(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of a head: those of even number, then those of odd; whatever else lies in a row."""
        heads = self.params.get(_TURNED[part]) or self.params["n_heads"]
        size = self.params.get("head_dim") or self.params["dim"] // self.params["n_heads"]
        if tensor.dim() == 0 or tensor.shape[0] != heads * size:
            return tensor
        rows = torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()
        flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        return flat[rows].view(tensor.dtype)


def _renamed(name: str, where: Path) -> str:
    """Raises CheckpointError for a name that Mistral's files do not have."""
    path, _, last = name.rpartition(".")
    last = _SCALES.get(last, last)
    if path in _TOP:
        return f"{_TOP[path]}.{last}"
    found = _LAYER.fullmatch(name)
    inside = _inside(found[2]) if found else None
    if found is None or inside is None:
        raise CheckpointError(f"{where}: {name}: no tensor of Mistral's layers is called so")
    return f"model.layers.{found[1]}.{inside}.{last}"


def _inside(path: str) -> str | None:
    """The path of a module in a layer."""
    if path in _NORMS:
        return _NORMS[path]
    if path in _ROUTERS:
        return "block_sparse_moe.gate"
    expert = _EXPERT.fullmatch(path) or _BARE_EXPERT.fullmatch(path)
    if expert:
        return f"block_sparse_moe.experts.{expert[1]}.{expert[2]}"
    room, _, own = path.partition(".")
    if room == "attention" and own in _ATTENTION:
        return f"self_attn.{_ATTENTION[own]}"
    if room == "feed_forward" and own in _FEED_FORWARD:
        return f"mlp.{_FEED_FORWARD[own]}"
    return None
