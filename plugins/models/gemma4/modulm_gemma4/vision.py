"""Gemma 4 with images (Google, 2026): images of any aspect ratio, with pooled patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_gemma4.attention import UnitNorm
from modulm_layers import activation, size
from modulm_towers import MultimodalConfig, MultimodalModel, Pieces, Tower, through, tiny_text

__all__ = ["Gemma4VisionConfig", "Gemma4ForConditionalGeneration"]

_LIMITS = ("input_min", "input_max", "output_min", "output_max")


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`. pooling_kernel_size: side of the squares of patches that are pooled into one
    token. use_clipped_linears: whether inputs and outputs of linear layers are clipped.
    """

    hidden_size: int = size(768)
    intermediate_size: int = size(3072)
    num_hidden_layers: int = size(16)
    num_attention_heads: int = size(12)
    num_key_value_heads: int = size(12)
    head_dim: int = size(64)
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    pooling_kernel_size: int = size(3)
    patch_size: int = size(16)
    position_embedding_size: int = size(10240)
    use_clipped_linears: bool = False
    standardize: bool = False
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads: does not divide num_attention_heads")
        if self.head_dim % 4:
            raise ValueError(f"head_dim: {self.head_dim} cannot be rotated in two halves")


@frozen(kw_only=True)
class _Keys:
    image_token_id: int = size(258880, least=0)
    video_token_id: int = size(258884, least=0)


@frozen(eq=False, kw_only=True)
class Gemma4VisionConfig(MultimodalConfig):
    """config.json of Gemma 4 with images."""

    vision_type: ClassVar[type] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class _Linear(Module):
    """A linear layer with optional clipping of inputs and outputs."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, c: _TowerConfig, b: Builder, inputs: int, outputs: int) -> None:
        super().__init__()
        self.clipped = c.use_clipped_linears
        self.linear = b.linear("linear", inputs, outputs, split=False)
        for name in _LIMITS if self.clipped else ():
            b.parameter(name, self, name, (1,))

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs] -> [tokens, outputs]."""
        if not self.clipped:
            plain: Tensor = self.linear(x)
            return plain
        projected = self.linear(torch.clamp(x, self.input_min, self.input_max))
        return torch.clamp(projected, self.output_min, self.output_max)


class _Attention(Module):
    """Attention with norms of queries, keys and values, and unscaled scores."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.size, hidden = c.head_dim, c.hidden_size
        heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q = _Linear(c, b.at("q_proj"), hidden, heads)
        self.k = _Linear(c, b.at("k_proj"), hidden, kv_heads)
        self.v = _Linear(c, b.at("v_proj"), hidden, kv_heads)
        self.out = _Linear(c, b.at("o_proj"), heads, hidden)
        self.q_norm = b.rms_norm("q_norm", c.head_dim, c.rms_norm_eps)
        self.k_norm = b.rms_norm("k_norm", c.head_dim, c.rms_norm_eps)
        self.v_norm = UnitNorm(c.rms_norm_eps)
        self.ops = b.ops

    def forward(self, x: Tensor, lengths: Sequence[int], turns: Tensor) -> Tensor:
        """x: [patches, hidden]; turns: [2, patches, head_dim], cosines and sines."""
        q, k, v = (part(x).view(len(x), -1, self.size) for part in (self.q, self.k, self.v))
        q, k = _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns)
        seen = self.ops.varlen_attention(q, k, self.v_norm(v), lengths, scale=1.0)
        out: Tensor = self.out(seen.flatten(1))
        return out


class _Layer(Module):
    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = (b.rms_norm(f"{n}_layernorm", c.hidden_size, c.rms_norm_eps) for n in names)
        self.norms = ModuleList(norms)
        self.attn, at = _Attention(c, b.at("self_attn")), b.at("mlp")
        self.gate = _Linear(c, at.at("gate_proj"), c.hidden_size, c.intermediate_size)
        self.up = _Linear(c, at.at("up_proj"), c.hidden_size, c.intermediate_size)
        self.down = _Linear(c, at.at("down_proj"), c.intermediate_size, c.hidden_size)
        self.act = activation(c.hidden_activation, b.ops)

    def forward(self, x: Tensor, lengths: Sequence[int], turns: Tensor) -> Tensor:
        """x: [patches, hidden] -> the same shape."""
        before, after, inner, last = self.norms
        x = x + after(self.attn(before(x), lengths, turns))
        seen = inner(x)
        out: Tensor = x + last(self.down(self.act(self.gate(seen)) * self.up(seen)))
        return out


class _Tower(Tower):
    """Encodes the concatenated patches of all images, with column and row positions."""

    positions: Tensor
    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, at = c, b.shared.dtype, b.at("patch_embedder")
        self.patch = at.linear("input_proj", 3 * c.patch_size**2, c.hidden_size, split=False)
        shape = (2, c.position_embedding_size, c.hidden_size)
        at.parameter("position_embedding_table", self, "positions", shape)
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(_Layer(c, b.at(f"encoder.layers.{i}")) for i in layers)
        for name in ("std_bias", "std_scale") if c.standardize else ():
            b.parameter(name, self, name, (c.hidden_size,))

    def run(self, pixels: Tensor, coordinates: Sequence[Tensor]) -> Pieces[list[Tensor]]:
        """pixels: [patches, values per patch] in [0, 1]; coordinates: [patches, 2] int64 (column,
        row) of each image -> [tokens, hidden] of each.
        """
        flat = torch.cat(list(coordinates))
        columns, rows = self.positions
        x = self.patch((2 * (pixels - 0.5)).to(self.dtype))
        x = x + columns[flat[:, 0]] + rows[flat[:, 1]]
        lengths, turns = (
            [len(image_coordinates) for image_coordinates in coordinates],
            self._turns(flat),
        )
        x = yield from through(self.layers, x, lengths, turns)
        return [self._pooled(*pair) for pair in zip(x.split(lengths), coordinates, strict=True)]

    def _pooled(self, x: Tensor, coordinates: Tensor) -> Tensor:
        kernel, root = self.config.pooling_kernel_size, self.config.hidden_size**0.5
        across = (int(coordinates[:, 0].max()) + 1) // kernel
        squares = coordinates[:, 0] // kernel + across * (coordinates[:, 1] // kernel)
        pooled = x.new_zeros(len(x) // kernel**2, x.shape[1], dtype=torch.float32)
        scaled = pooled.index_add_(0, squares, x.float()) * (root / kernel**2)
        if self.config.standardize:
            scaled = (scaled - self.std_bias.float()) * self.std_scale.float()
        return scaled.to(x.dtype)

    def _turns(self, coordinates: Tensor) -> Tensor:
        """[2, patches, head_dim]: half of a head is rotated by columns, the other half by rows."""
        half, rope = self.config.head_dim // 2, self.config.rope_parameters
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=coordinates.device) / half
        waves = 1.0 / float(rope.get("rope_theta", 100.0)) ** steps
        angles = (coordinates[:, :, None].float() * waves).repeat(1, 1, 2).flatten(1)
        return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """x: [patches, heads, head_dim], whose halves are rotated separately."""
    cos, sin = turns[:, :, None].to(x.dtype)
    a, b, c, d = x.chunk(4, dim=-1)
    return x * cos + torch.cat([-b, a, -d, c], dim=-1) * sin


def patches_of(model: MultimodalModel, item: MediaItem) -> list[tuple[Tensor, Tensor]]:
    """([patches, values per patch], [patches, 2] columns and rows) of an image or each frame."""
    names = {
        "image": ("pixel_values", "image_position_ids"),
        "video": ("pixel_values_videos", "video_position_ids"),
    }
    pixels, coordinates = (model.tensor(item, name) for name in names[item.kind])
    frames = zip(pixels, coordinates, (coordinates != -1).all(-1), strict=True)
    return [(patches[inside], at[inside]) for patches, at, inside in frames]


class Gemma4ForConditionalGeneration(MultimodalModel):
    """Gemma 4 with images and video. Audio is not supported."""

    api = 1
    media = ("image", "video")
    config_type: ClassVar[type] = Gemma4VisionConfig
    names = WeightNames(
        rename=((r"^model\.(embed_vision)\b", r"\1"),),
        ignore=(r"^(model\.)?(audio_tower|embed_audio)\.",),
        rewrite=(
            Rewrite(
                rf"^vision_tower\..*\.({'|'.join(_LIMITS)})$",
                lambda name, tensor: [(name, tensor.reshape(1))],
            ),
        ),
    )

    @classmethod
    def spans(cls, config: Any) -> bool | Literal["windows"]:
        both = config.text.text.use_bidirectional_attention == "vision"
        return "windows" if both else False

    def make_encoders(self, config: Gemma4VisionConfig, b: Builder) -> None:
        vision, at = config.vision, b.at("embed_vision")
        self.takes_embeds = self.text.takes_embeds
        self.text.media_tokens = (config.top_level.image_token_id, config.top_level.video_token_id)
        self.tower = _Tower(vision, b.at("vision_tower"))
        self.norm = UnitNorm(vision.rms_norm_eps)
        name = "embedding_projection"
        self.projector = at.linear(name, vision.hidden_size, config.hidden_size, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        each = [patches_of(self, item) for item in items]
        pixels, coordinates = zip(*(frame for frames in each for frame in frames), strict=True)
        per_frame = yield from self.tower.run(torch.cat(pixels), coordinates)
        tokens: Tensor = self.projector(self.norm(torch.cat(per_frame)))
        parts = list(tokens.split([len(frame) for frame in per_frame]))
        return [torch.cat([parts.pop(0) for _ in frames]) for frames in each]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = tiny_text(
            "gemma4_text",
            num_hidden_layers=4,
            head_dim=16,
            global_head_dim=32,
            sliding_window=80,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=8,
            max_position_embeddings=512,
            use_bidirectional_attention="vision",
        )
        return {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "boi_token_id": 480,
            "eoi_token_id": 481,
            "image_token_id": 482,
            "video_token_id": 483,
            "audio_token_id": 484,
            "audio_config": None,
            "text_config": text,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 2,
                "pooling_kernel_size": 2,
                "position_embedding_size": 200,
                "use_clipped_linears": True,
                "standardize": True,
            },
        }
