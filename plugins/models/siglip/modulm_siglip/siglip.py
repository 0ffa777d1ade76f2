"""SigLIP 1 (arXiv 2303.15343), and SigLIP 2 (arXiv 2502.14786) for images of one size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import PlainMLP
from modulm_siglip.clip import ClipConfig, CLIPModel, ClipTextConfig, TextTower
from modulm_towers import ClipTower

__all__ = ["Pool", "SiglipConfig", "SiglipModel"]


class SiglipConfig(ClipConfig):
    """config.json of SigLIP.

    Vectors are as wide as the image encoder. The padding token comes from the tokenizer, because
    the file may omit it.
    """

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        config = super().from_table(table, file)
        pad = _pad_token(Path(file).parent)
        return config if pad is None else evolve(config, text=evolve(config.text, pad_token_id=pad))

    @classmethod
    def width(cls, keys: Mapping[str, Any], text: ClipTextConfig, vision: Any, file: str) -> int:
        outputs = text.projection_size or text.hidden_size
        if outputs != vision.hidden_size:
            raise CheckpointError(
                f"{file}: projection_size: {outputs}, images have {vision.hidden_size}"
            )
        if not keys["vision_config"].get("vision_use_head", True):
            raise CheckpointError(f"{file}: vision_use_head: false: no vectors of images")
        return outputs


class Pool(Module):
    """Attention pooling: a learned query attends to all patches, followed by a feed-forward
    block.
    """

    probe: Tensor

    def __init__(self, c: Any, b: Builder) -> None:
        super().__init__()
        hidden, at = c.hidden_size, b.at("attention")
        self.heads, self.ops = c.num_attention_heads, b.ops
        b.parameter("probe", self, "probe", (1, 1, hidden))
        for part in ("query", "key", "value"):
            setattr(self, part, at.linear(f"{part}_proj", hidden, hidden, bias=True, split=False))
        self.out = at.linear("out_proj", hidden, hidden, bias=True, split=False)
        self.norm = b.layer_norm("layernorm", hidden, c.layer_norm_eps)
        self.mlp = PlainMLP(
            b.at("mlp"), hidden, c.intermediate_size, c.hidden_act, up="fc1", down="fc2"
        )

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [patches, hidden] of images of these lengths -> [n, hidden]."""
        n, hidden = len(lengths), x.shape[-1]
        k, v = (part(x).view(len(x), self.heads, -1) for part in (self.key, self.value))
        q = self.query(self.probe[0]).view(1, self.heads, 1, -1)
        if len(set(lengths)) == 1:
            k, v = (t.view(n, -1, *t.shape[1:]).transpose(1, 2) for t in (k, v))
            seen = scaled_dot_product_attention(q.expand(n, -1, -1, -1), k, v)
        else:
            rows = zip(k.split(list(lengths)), v.split(list(lengths)), strict=True)
            pairs = ((k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in rows)
            seen = torch.cat([scaled_dot_product_attention(q, *pair) for pair in pairs])
        attended = self.out(seen.transpose(1, 2).reshape(n, hidden))
        out: Tensor = attended + self.mlp(self.norm(attended))
        return out


class SiglipModel(CLIPModel):
    """SigLIP: texts are padded to one length, with bidirectional attention."""

    config_type: ClassVar[type] = SiglipConfig

    def make(self, config: Any, b: Builder) -> None:
        self.text = TextTower(config.text, b.at("text_model"), causal=False)
        self.tower = ClipTower(config.vision, b.at("vision_model"))
        self.pool = Pool(config.vision, b.at("vision_model.head"))
        inputs, width = config.text.hidden_size, config.hidden_size
        self.text_out = b.linear("text_model.head", inputs, width, bias=True, split=False)

    def vectors(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        c = self.config.text
        pad, most = c.pad_token_id or 0, c.max_position_embeddings
        whole = tokens.new_full((len(lengths), most), pad)
        for row, text_tokens in zip(whole, tokens.split(list(lengths)), strict=True):
            row[: len(text_tokens)] = text_tokens
        states = self.text(whole.flatten(), [most] * len(lengths))
        projected: Tensor = self.text_out(states.view(len(lengths), most, -1)[:, -1].contiguous())
        return projected.repeat_interleave(torch.tensor(lengths, device=projected.device), dim=0)

    def pictures(self, pixels: Tensor) -> Tensor:
        states = self.tower(pixels)
        pooled: Tensor = self.pool(states.flatten(0, 1), [states.shape[1]] * len(states))
        return pooled

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        split = Rewrite(r"\.head\.attention\.in_proj_(weight|bias)$", _parts)
        return WeightNames(
            rename=names.rename, ignore=names.ignore, rewrite=(*names.rewrite, split)
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        like = super().tiny()
        text = {**like["text_config"], "model_type": "siglip_text_model", "pad_token_id": 1}
        vision = {**like["vision_config"], "model_type": "siglip_vision_model"}
        return {
            "architectures": ["SiglipModel"],
            "model_type": "siglip",
            "text_config": {**text, "hidden_size": 48, "projection_size": 48},
            "vision_config": vision,
        }


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Split queries, keys and values, which are stored as one tensor."""
    kind = name.rpartition("_")[2]
    at = name.removesuffix(f"in_proj_{kind}")
    parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
    return [(f"{at}{part}_proj.{kind}", part_tensor) for part, part_tensor in parts]


def _pad_token(folder: Path) -> int | None:
    """The id of the padding token; None if the tokenizer's files do not define it.

    Raises UnsupportedError for padding on the left.
    """
    settings = _table(folder / "tokenizer_config.json")
    if settings.get("padding_side") == "left":
        raise UnsupportedError(
            f"{folder}/tokenizer_config.json: padding_side: not supported yet: left"
        )
    pad = settings.get("pad_token")
    pad = pad.get("content") if isinstance(pad, Mapping) else pad
    if not isinstance(pad, str):
        return None
    added = settings.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        known = {token["content"]: int(index) for index, token in added.items()}
    else:
        tokens = _table(folder / "tokenizer.json").get("added_tokens", ())
        known = {token["content"]: int(token["id"]) for token in tokens}
    return known.get(pad)


def _table(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table
