"""Moondream 3 (2025): an overview and overlapping crops of an image, which attend both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, Rewrite, WeightNames, read_config
from modulm_layers import AttentionNames, PlainMLP, size
from modulm_moondream.text import MoondreamText, MoondreamTextConfig, rotated, split_fused
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    patches,
    through,
)

__all__ = ["Moondream3Config", "Moondream3ForCausalLM"]

_EPS = 1e-5
_ACT = "gelu_pytorch_tanh"
#: Base of the rotary positions, and the token that ends a question, which no answer contains.
_THETA, _ANSWER = 1_500_000.0, 3
_NAMES = BlockNames("ln1", "attn", AttentionNames("q", "k", "v", "proj", "qkv"), "ln2")


@frozen(kw_only=True)
class _VisionConfig:
    """`vision` of config.json. overlap_margin: patches that a crop shares with its neighbours."""

    enc_dim: int = size(1152)
    enc_patch_size: int = size(14)
    enc_n_layers: int = size(27)
    enc_ff_dim: int = size(4304)
    enc_n_heads: int = size(16)
    proj_inner_dim: int = size(8192)
    crop_size: int = size(378)
    max_crops: int = size(12)
    overlap_margin: int = size(4)
    in_channels: int = size(3)

    def __attrs_post_init__(self) -> None:
        if self.enc_dim % self.enc_n_heads:
            raise ValueError("enc_n_heads: does not divide enc_dim")
        if self.side <= 2 * self.overlap_margin:
            raise ValueError(f"overlap_margin: {self.overlap_margin} of {self.side} patches")

    @property
    def side(self) -> int:
        """Patches along a crop."""
        return self.crop_size // self.enc_patch_size


@frozen(eq=False, kw_only=True)
class Moondream3Config(MultimodalConfig):
    """config.json of Moondream 3, whose keys are in `config`. answer: the token that ends a
    question.
    """

    vision_type: ClassVar[type] = _VisionConfig

    answer: int = _ANSWER

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        kind = table.get("model_type", "moondream3")
        if kind != "moondream3":
            raise UnsupportedError(f"{file}: model_type: not supported yet: {kind!r} (Moondream 2)")
        parts = {"config": table.get("config") or {}}
        for key in ("text", "vision", "tokenizer", "text.moe"):
            outer, _, inner = key.rpartition(".")
            holder = parts.get(outer or "config")
            parts[inner if not outer else key] = (
                (holder.get(inner) or {}) if isinstance(holder, Mapping) else holder
            )
        for key, part in parts.items():
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        text = {key: value for key, value in parts["text"].items() if key != "moe"}
        heads, width = text.get("n_heads", 32), text.get("dim", 2048)
        if type(heads) is not int or type(width) is not int or heads < 1 or width % heads:
            raise CheckpointError(f"{file}: n_heads: {heads!r} do not divide dim {width!r}")
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta", _THETA),
            "partial_rotary_factor": rotated(width // heads),
        }
        inner = read_config({**text, **parts["text.moe"]}, MoondreamTextConfig, file)
        answer = parts["tokenizer"].get("answer_id", _ANSWER)
        if type(answer) is not int or not 0 <= answer < inner.vocab_size:
            raise CheckpointError(f"{file}: answer_id: {answer!r}")
        return cls(
            text=TextConfig(MoondreamText, inner, "Moondream3ForCausalLM"),
            vision=read_config(parts["vision"], _VisionConfig, file),
            answer=answer,
        )


class _Tower(Tower):
    """A vision transformer on crops of one size."""

    positions: Tensor

    def __init__(self, c: _VisionConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        pixels = c.in_channels * c.enc_patch_size**2
        self.patch = b.linear("patch_emb", pixels, c.enc_dim, bias=True, split=False)
        b.parameter("pos_emb", self, "positions", (1, c.side**2, c.enc_dim))
        block = BlockShape(
            hidden=c.enc_dim, inner=c.enc_ff_dim, heads=c.enc_n_heads, act=_ACT, eps=_EPS,
            names=_NAMES,
        )  # fmt: skip
        layers = range(c.enc_n_layers)
        self.layers = ModuleList(Block(b.at(f"blocks.{i}"), block) for i in layers)
        self.post = b.layer_norm("post_ln", c.enc_dim, _EPS)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, side, side] -> [n, rows, columns, width]."""
        c, n = self.config, len(pixels)
        cut = patches(pixels.to(self.dtype), c.enc_patch_size)
        x = self.patch(cut.flatten(0, 1)).view(n, c.side**2, -1) + self.positions
        x = yield from through(self.layers, x.flatten(0, 1), [c.side**2] * n)
        out: Tensor = self.post(x).view(n, c.side, c.side, -1)
        return out


class Moondream3ForCausalLM(MultimodalModel):
    """Moondream 3: questions and captions. Points and boxes are not supported."""

    api = 1
    config_type: ClassVar[type] = Moondream3Config
    bidirectional = True

    def make_encoders(self, config: Moondream3Config, b: Builder) -> None:
        c, at = config.vision, b.at("vision")
        self.tower = _Tower(c, at)
        self.projector = PlainMLP(
            at.at("proj_mlp"), 2 * c.enc_dim, c.proj_inner_dim, _ACT, up="fc1", down="fc2",
            outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        c, embeddings = self.config.vision, []
        for item in items:
            states = yield from self.tower.run(self.tensor(item, "pixel_values"))
            tiling = item.tensors["tiling"].reshape(-1).tolist()
            joined = _joined(states[1:], tiling, c.overlap_margin).permute(2, 0, 1)
            pooled = F.adaptive_avg_pool2d(joined, (c.side, c.side)).permute(1, 2, 0)
            both = torch.cat([states[0], pooled], dim=-1).flatten(0, 1)
            embeddings.append(self.projector(both))
        return embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        if not self.only_encodes:
            logits[:, self.config.answer] = torch.finfo(logits.dtype).min
        return logits

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            rename=(
                (r"^model\.", ""),
                (r"^text\.wte$", "text.wte.weight"),
                (r"^text\.blocks\.", "text.layers."),
            ),
            ignore=(r"^region\.",),
            rewrite=(Rewrite(r"^text\.layers\.\d+\.mlp\.fc[12]\.weight$", split_fused),),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Moondream3ForCausalLM"],
            "model_type": "moondream3",
            "config": {
                "text": MoondreamText.tiny(),
                "vision": {
                    "enc_dim": 32,
                    "enc_patch_size": 4,
                    "enc_n_layers": 2,
                    "enc_ff_dim": 48,
                    "enc_n_heads": 2,
                    "proj_inner_dim": 48,
                    "crop_size": 16,
                    "max_crops": 4,
                    "overlap_margin": 1,
                },
            },
        }


def _joined(crops: Tensor, tiling: Sequence[int], margin: int) -> Tensor:
    """[crops, side, side, width] -> [rows, columns, width]: crops without their shared borders."""
    rows, columns = tiling
    side = crops.shape[1]
    lines = []
    for row in range(rows):
        top, bottom = margin * (row > 0), side - margin * (row < rows - 1)
        line = [
            crops[row * columns + column][
                top:bottom, margin * (column > 0) : side - margin * (column < columns - 1)
            ]
            for column in range(columns)
        ]
        lines.append(torch.cat(line, dim=1))
    return torch.cat(lines)
