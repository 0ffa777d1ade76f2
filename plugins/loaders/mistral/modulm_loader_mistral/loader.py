"""Load checkpoints as Mistral publishes them: params.json, consolidated*.safetensors, tekken.json.

Tensor names are those of Llama's reference code. There, the two numbers of a query or key that are
rotated together are adjacent; the model families here store them half a head apart, so the rows are
reordered, those of a vision encoder, too. Its tensors are skipped where params.json does not
describe it. The package `modulm-tokenizer-mistral` reads the tokenizer.
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
_SIGHT = re.compile(r"vision_encoder\.transformer\.layers\.(\d+)\.(.+)\.(\w+)")
_AROUND_SIGHT = {
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
}
_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_LATENT = {
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "q_a_norm": "q_a_layernorm",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "wkv_b": "kv_b_proj",
    "kv_a_norm": "kv_a_layernorm",
}
_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.experts\.(\d+)\.(w[123])")
_ROUTERS = ("feed_forward.gate", "block_sparse_moe.gate", "gate")
_BARE_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])")
_SCALES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
#: Layers whose heads are reordered for rotary embeddings.
_TURNED = {"q_proj": "n_heads", "k_proj": "n_kv_heads"}


class MistralLoader(SafetensorsFolder):
    """`--load-format mistral`; selected automatically if there is no config.json."""

    name = "mistral"
    api = 1
    downloads = (_WEIGHTS,)
    INDEX = "consolidated.safetensors.index.json"

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if not (path / _PARAMS).exists() or (path / "config.json").exists():
            return None
        return f"found {_PARAMS} and {_WEIGHTS}" if any(path.glob(_WEIGHTS)) else None

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """Parse params.json. Raises CheckpointError."""
        file = self.path / _PARAMS
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: {error}") from error
        if not isinstance(table, dict):
            raise CheckpointError(f"{file}: must be a JSON object")
        inner = table.pop("text_config", None) or {}
        return {**table, **inner} if isinstance(inner, dict) else table

    def configuration(self) -> Mapping[str, object]:
        return configuration(self.params, str(self.path / _PARAMS))

    def files(self) -> list[str]:
        files = sorted(file.name for file in self.path.glob(_WEIGHTS))
        if not files:
            raise CheckpointError(f"{self.path}: no {_WEIGHTS} found")
        return files

    def headers(self, file: str) -> Iterable[StoredTensor]:
        skipped = 0
        for stored in super().headers(file):
            if stored.name.startswith(_VISION) and not self._sight:
                skipped += 1
            else:
                yield stored
        if skipped:
            log.warning("%s: skipped %d tensors of the vision encoder", file, skipped)

    @property
    def _sight(self) -> Mapping[str, Any]:
        """The vision encoder's table, empty if there is none."""
        table = self.params.get("vision_encoder")
        return table if isinstance(table, Mapping) else {}

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Map Mistral's names to those of the model family."""
        stored = super().index()
        names = {name: _renamed(name, self.path) for name in stored}
        if not self.params.get("kv_lora_rank"):
            return names
        return {name: _in_deepseek(ours) for name, ours in names.items()}

    def index(self) -> Mapping[str, StoredTensor]:
        tensors = super().index()
        return {
            self._names[name]: evolve(tensors[name], name=self._names[name]) for name in tensors
        }

    def by_file(self) -> Mapping[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name, stored in super().index().items():
            names.setdefault(stored.file, []).append(name)
        return names

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().read():
            ours = self._names[name]
            part = ours.rpartition(".")[0].rpartition(".")[2]
            turned = part in _TURNED
            yield ours, _turned(tensor, *self._heads(ours, part)) if turned else tensor

    def _heads(self, name: str, part: str) -> tuple[int, int]:
        """(Number of heads, numbers in each)."""
        if name.startswith("vision_tower."):
            heads = self._sight["num_attention_heads"]
            return heads, self._sight["hidden_size"] // heads
        heads = self.params.get(_TURNED[part]) or self.params["n_heads"]
        return heads, self.params.get("head_dim") or self.params["dim"] // self.params["n_heads"]


def _turned(tensor: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """Reorder the rows of each head: even rows first, then odd ones."""
    if tensor.dim() == 0 or tensor.shape[0] != heads * size:
        return tensor
    rows = torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()
    flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return flat[rows].view(tensor.dtype)


def _renamed(name: str, where: Path) -> str:
    """Return the model family's name. Raises CheckpointError for names unknown in Mistral's
    files.
    """
    path, _, last = name.rpartition(".")
    last = _SCALES.get(last, last)
    if path in _TOP or path in _AROUND_SIGHT:
        return f"{_TOP.get(path) or _AROUND_SIGHT[path]}.{last}"
    seen = _SIGHT.fullmatch(name)
    within = _within_sight(seen[2]) if seen else None
    if seen and within:
        return f"vision_tower.transformer.layers.{seen[1]}.{within}.{last}"
    layer = _LAYER.fullmatch(name)
    inside = _inside(layer[2]) if layer else None
    if layer is None or inside is None:
        raise CheckpointError(f"{where}: {name}: unknown tensor name for Mistral's layers")
    return f"model.layers.{layer[1]}.{inside}.{last}"


def _in_deepseek(name: str) -> str:
    """Return the name of Mixtral's router or expert in models with DeepSeek's block."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    expert = re.fullmatch(r"(.*\.mlp\.experts\.\d+)\.(w[123])\.(\w+)", name)
    return f"{expert[1]}.{_FEED_FORWARD[expert[2]]}.{expert[3]}" if expert else name


def _inside(path: str) -> str | None:
    """Return the path of a module inside a layer, or None."""
    if path in _NORMS:
        return _NORMS[path]
    if path in _ROUTERS:
        return "block_sparse_moe.gate"
    expert = _EXPERT.fullmatch(path) or _BARE_EXPERT.fullmatch(path)
    if expert:
        return f"block_sparse_moe.experts.{expert[1]}.{expert[2]}"
    block, _, projection = path.partition(".")
    if block == "attention" and projection in _ATTENTION:
        return f"self_attn.{_ATTENTION[projection]}"
    if block == "attention" and projection in _LATENT:
        return f"self_attn.{_LATENT[projection]}"
    if block == "shared_experts" and projection in _FEED_FORWARD:
        return f"mlp.shared_experts.{_FEED_FORWARD[projection]}"
    if block == "feed_forward" and projection in _FEED_FORWARD:
        return f"mlp.{_FEED_FORWARD[projection]}"
    return None


def _within_sight(path: str) -> str | None:
    """Return the path of a module inside a layer of the vision encoder, or None."""
    block, _, projection = path.partition(".")
    if block == "attention" and projection in _ATTENTION:
        return f"{block}.{_ATTENTION[projection]}"
    if block == "feed_forward" and projection in _FEED_FORWARD:
        return f"{block}.{_FEED_FORWARD[projection]}"
    return path if path in _NORMS else None
