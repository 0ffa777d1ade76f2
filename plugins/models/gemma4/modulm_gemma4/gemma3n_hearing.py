"""Gemma 3n with sounds and images: a conformer (USM, arXiv 2303.01037) of 25 frames, 6.25 tokens
per second, and MobileNet 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_gemma4.attention import UnitNorm
from modulm_gemma4.gemma3n import Gemma3nForCausalLM
from modulm_gemma4.mobilenet import MobileNetConfig, MobileNetTower
from modulm_layers import PlainMLP, only, size
from modulm_towers import (
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    through,
)

__all__ = ["Gemma3nForConditionalGeneration", "Gemma3nHearingConfig"]

_EPS = 1e-6
_PAIRS = ((3, 3), (3, 3))


@frozen(kw_only=True)
class _TowerConfig:
    """`audio_config`. vocab_offset, vocab_size: ids of tokens that the encoder embeds.
    conf_attention_context_left, _right: frames that a frame attends to, itself on the left.
    """

    vocab_size: int = size(128)
    vocab_offset: int = size(262272, least=0)
    input_feat_size: int = size(128, least=4)
    hidden_size: int = size(1536)
    rms_norm_eps: float = _EPS
    gradient_clipping: float = 1e10
    conf_attention_context_left: int = size(13)
    conf_attention_context_right: int = size(0, least=0)
    conf_attention_logit_cap: float = 50.0
    conf_num_attention_heads: int = size(8)
    conf_num_hidden_layers: int = size(12)
    conf_conv_kernel_size: int = size(5)
    conf_reduction_factor: int = size(4)
    conf_residual_weight: float = 0.5
    sscp_conv_channel_size: tuple[int, ...] = (128, 32)
    sscp_conv_group_norm_eps: float = 1e-3
    sscp_conv_kernel_size: tuple[tuple[int, ...], ...] = _PAIRS
    sscp_conv_stride_size: tuple[tuple[int, ...], ...] = ((2, 2), (2, 2))

    def __attrs_post_init__(self) -> None:
        only(self, sscp_conv_kernel_size=(_PAIRS,), sscp_conv_stride_size=(((2, 2), (2, 2)),))
        if self.hidden_size % self.conf_num_attention_heads or self.hidden_size % 2:
            raise ValueError("conf_num_attention_heads: does not divide hidden_size")
        if len(self.sscp_conv_channel_size) != 2 or min(self.sscp_conv_channel_size) < 1:
            raise ValueError("sscp_conv_channel_size: must be two numbers of channels")
        if not self.conf_attention_logit_cap:
            raise ValueError("conf_attention_logit_cap: must not be 0")

    @property
    def past(self) -> int:
        """Frames before a frame that it attends to."""
        return self.conf_attention_context_left - 1


@frozen(kw_only=True)
class _Keys:
    audio_soft_tokens_per_image: int = size(188)
    eoa_token_id: int = size(262272, least=0)
    eoi_token_id: int = size(262144, least=0)


@frozen(eq=False, kw_only=True)
class Gemma3nHearingConfig(MultimodalConfig):
    """config.json of Gemma 3n."""

    vision_type: ClassVar[type | None] = MobileNetConfig
    audio_type: ClassVar[type | None] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class _Subsampled(Module):
    """A convolution that halves time and frequency; a norm over all frames so far."""

    weight: Tensor

    def __init__(self, c: _TowerConfig, b: Builder, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Convolution(b, "conv", inputs, outputs, (3, 3), stride=2, bias=False)
        b.parameter("norm.weight", self, "weight", (outputs,))
        self.eps = c.sscp_conv_group_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """[1, inputs, frames, bins] -> [1, outputs, frames / 2, bins / 2]."""
        x = self.conv(F.pad(x, (1, 1, 0, 2))).float()
        numbers = x.shape[1] * x.shape[3]
        counts = numbers * torch.arange(1, x.shape[2] + 1, device=x.device)[None, None, :, None]
        centered = x - x.sum((1, 3), keepdim=True).cumsum(2) / counts
        variance = centered.square().sum((1, 3), keepdim=True).cumsum(2) / counts
        scaled = centered * (variance + self.eps).rsqrt() * self.weight.float()[:, None, None]
        return F.relu(scaled.to(self.weight.dtype))


class _Attention(Module):
    """Attention to near frames, with a term for query and distance, and capped scores."""

    dim_scale: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, width = c, c.hidden_size
        self.norm = b.rms_norm("pre_attn_norm", width, _EPS)
        at = b.at("attn")
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv = at.linear("qkv_proj", width, parts, split=False)
        self.distances = at.linear(
            "relative_position_embedding.pos_proj", width, width, split=False
        )
        at.parameter("per_dim_scale", self, "dim_scale", (width // c.conf_num_attention_heads,))
        self.out = b.linear("post", width, width, split=False)
        self.post = b.rms_norm("post_norm", width, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        """x: [frames, width] of one sound."""
        c = self.config
        clip, heads = c.gradient_clipping, c.conf_num_attention_heads
        normed = self.norm(x.clamp(-clip, clip))
        q, k, v = self.qkv(normed).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        q = q * (q.shape[-1] ** -0.5 / math.log(2)) * F.softplus(self.dim_scale)
        sines = _sines(c.past, c.conf_attention_context_right, c.hidden_size)
        far = self.distances(sines.to(x.device, x.dtype)).unflatten(-1, (heads, -1))
        at = torch.arange(len(x), device=x.device)
        index = c.past - at[:, None] + at
        near = (index >= 0) & (index < len(far))
        of_distance = q @ far.permute(1, 2, 0)
        index = index.clamp(0, len(far) - 1).expand(heads, -1, -1)
        scores = q @ k.transpose(1, 2) + of_distance.gather(2, index)
        cap = c.conf_attention_logit_cap
        scores = (torch.tanh(scores / cap) * cap).masked_fill(~near, -torch.inf)
        seen = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        out = self.out(seen.transpose(0, 1).flatten(1)).clamp(-clip, clip)
        return x + self.post(out)


def _sines(past: int, future: int, width: int) -> Tensor:
    """[past + future + 1, width] float32 of the distances from `past` down to `-future`."""
    at = torch.arange(past, -future - 1, -1, dtype=torch.float32)
    half = width // 2
    waves = torch.exp(torch.arange(half) * (-math.log(1e4) / max(half - 1, 1)))
    angles = at[:, None] * waves
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class _Feed(Module):
    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        width, self.clip, self.weight = c.hidden_size, c.gradient_clipping, c.conf_residual_weight
        self.norm = b.rms_norm("pre_layer_norm", width, _EPS)
        self.mlp = PlainMLP(
            b, width, 4 * width, "silu", bias=False, up="ffw_layer_1", down="ffw_layer_2"
        )
        self.post = b.rms_norm("post_layer_norm", width, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.mlp(self.norm(x.clamp(-self.clip, self.clip)))
        out: Tensor = x + self.post(inner.clamp(-self.clip, self.clip)) * self.weight
        return out


class _Convolved(Module):
    """Gated depthwise convolution over a frame and those before it."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        width, self.clip = c.hidden_size, c.gradient_clipping
        self.kernel = c.conf_conv_kernel_size
        self.norm = b.rms_norm("pre_layer_norm", width, c.rms_norm_eps)
        self.start = b.linear("linear_start", width, 2 * width, split=False)
        self.depth = Convolution(
            b, "depthwise_conv1d", width, width, (self.kernel,), groups=width, bias=False
        )
        self.inner = b.rms_norm("conv_norm", width, c.rms_norm_eps)
        self.end = b.linear("linear_end", width, width, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [frames, width] of one sound."""
        wide = F.glu(self.start(self.norm(x)), dim=-1)
        wide = self.depth(F.pad(wide.T[None], (self.kernel - 1, 0)))[0].T
        wide = self.inner(wide.clamp(-self.clip, self.clip).contiguous())
        out: Tensor = x + self.end(F.silu(wide))
        return out


class _Block(Module):
    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.clip = c.gradient_clipping
        self.parts = ModuleList([
            _Feed(c, b.at("ffw_layer_start")), _Attention(c, b.at("attention")),
            _Convolved(c, b.at("lconv1d")), _Feed(c, b.at("ffw_layer_end")),
        ])  # fmt: skip
        self.norm = b.rms_norm("norm", c.hidden_size, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        out: Tensor = self.norm(x.clamp(-self.clip, self.clip))
        return out


class _Tower(Tower):
    """Encodes one sound at a time."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, at = c, b.shared.dtype, b.at("subsample_conv_projection")
        one, two = c.sscp_conv_channel_size
        self.first, self.second = (
            _Subsampled(c, at.at("conv_0"), 1, one), _Subsampled(c, at.at("conv_1"), one, two),
        )  # fmt: skip
        bins = ((c.input_feat_size - 1) // 2) // 2 + 1
        self.project = at.linear("input_proj_linear", two * bins, c.hidden_size, split=False)
        blocks = range(c.conf_num_hidden_layers)
        self.layers = ModuleList(_Block(c, b.at(f"conformer.{i}")) for i in blocks)

    def run(self, mel: Tensor, heard: int) -> Pieces[Tensor]:
        """[frames, bins], of which `heard` are of the sound -> [tokens, width]."""
        x = self.second(self.first(mel.to(self.dtype)[None, None]))
        x = self.project(x[0].permute(1, 2, 0).flatten(1))
        # Nothing reads frames after itself but the convolutions above.
        x = yield from through(self.layers, x[: -(-heard // 4)].contiguous())
        return x[:: self.config.conf_reduction_factor]


class _Embedder(Module):
    """Projects what an encoder returns (soft), and its own tokens (hard), to the text's width."""

    table: Tensor

    def __init__(self, c: Any, b: Builder, hidden: int) -> None:
        super().__init__()
        self.offset = c.vocab_offset
        b.parameter("embedding.weight", self, "table", (c.vocab_size, c.hidden_size))
        self.hard_norm, self.soft_norm = (
            b.rms_norm(f"{kind}_embedding_norm", c.hidden_size, c.rms_norm_eps)
            for kind in ("hard", "soft")
        )
        self.projector = b.linear("embedding_projection", c.hidden_size, hidden, split=False)
        self.post = UnitNorm(c.rms_norm_eps)

    def soft(self, states: Tensor) -> Tensor:
        """[n, width of the encoder] -> [n, hidden]."""
        out: Tensor = self.post(self.projector(self.soft_norm(states.contiguous())))
        return out

    def hard(self, *rows: int) -> Tensor:
        """Rows of the table -> [n, hidden]."""
        out: Tensor = self.post(self.projector(self.hard_norm(self.table[list(rows)])))
        return out


class Gemma3nForConditionalGeneration(MultimodalModel):
    """Gemma 3n E2B and E4B with images, and sounds of up to 30 seconds."""

    api = 1
    media = ("image", "audio")
    config_type: ClassVar[type] = Gemma3nHearingConfig
    names = WeightNames(rename=((r"^model\.(embed_audio|embed_vision)\b", r"\1"),))

    def make_encoders(self, config: Gemma3nHearingConfig, b: Builder) -> None:
        self.takes_embeds = self.text.takes_embeds
        self.tower = _Tower(config.audio, b.at("audio_tower"))
        self.heard = _Embedder(config.audio, b.at("embed_audio"), config.hidden_size)
        self.sight = MobileNetTower(config.vision, b.at("vision_tower.timm_model"))
        self.seen = _Embedder(config.vision, b.at("embed_vision"), config.hidden_size)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        keys, outputs = self.config.top_level, {}
        images = [index for index, item in enumerate(items) if item.kind == "image"]
        if images:
            pixels = torch.cat([self.tensor(items[index], "pixel_values") for index in images])
            states = yield from self.sight.run(pixels)
            # The token after an image.
            end = self.seen.hard(keys.eoi_token_id - self.seen.offset)
            for index, image in zip(images, states * states.shape[-1] ** 0.5, strict=True):
                outputs[index] = torch.cat([self.seen.soft(image), end])
        for index, item in enumerate(items):
            if index not in outputs:
                outputs[index] = yield from self._hear(item)
        return [outputs[index] for index in range(len(items))]

    def _hear(self, item: MediaItem) -> Pieces[Tensor]:
        c, keys = self.config.audio, self.config.top_level
        # What fills a sound up, and the token after it.
        fill, end = self.heard.hard(-1, keys.eoa_token_id - c.vocab_offset).split(1)
        heard = int(item.tensors["input_features_mask"].sum())
        mel = self.tensor(item, "input_features").reshape(-1, c.input_feat_size)
        tokens = self.heard.soft((yield from self.tower.run(mel, heard)))
        missing = keys.audio_soft_tokens_per_image - len(tokens)
        return torch.cat([tokens, fill.expand(missing, -1), end])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = {key: v for key, v in Gemma3nForCausalLM.tiny().items() if key != "architectures"}
        return {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "model_type": "gemma3n",
            "audio_soft_tokens_per_image": 20,
            "boa_token_id": 470,
            "eoa_token_id": 482,
            "audio_token_id": 483,
            "image_token_id": 481,
            "eoi_token_id": 480,
            "boi_token_id": 471,
            "text_config": {**text, "vocab_size_per_layer_input": 480},
            "vision_soft_tokens_per_image": 16,
            "vision_config": {
                "model_type": "gemma3n_vision",
                "hidden_size": 32,
                "vocab_size": 2,
                "vocab_offset": 480,
                "model_args": {"channel_multiplier": 0.0625, "msfa_output_resolution": 4},
            },
            "audio_config": {
                "model_type": "gemma3n_audio",
                "vocab_size": 30,
                "vocab_offset": 482,
                "input_feat_size": 16,
                "hidden_size": 32,
                "conf_attention_context_left": 4,
                "conf_attention_context_right": 1,
                "conf_attention_chunk_size": 3,
                "conf_num_attention_heads": 2,
                "conf_num_hidden_layers": 2,
                "conf_conv_kernel_size": 3,
                "conf_reduction_factor": 2,
                "sscp_conv_channel_size": [8, 4],
            },
        }
