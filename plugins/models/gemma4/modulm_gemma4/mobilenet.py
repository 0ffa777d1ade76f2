"""MobileNet 5 with 300 million weights, Gemma 3n's encoder of images: blocks of MobileNet 4 (Qin et
al., arXiv 2404.10518) with RMS norms over channels, and a block that joins the last two stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import Factory, frozen
from torch import Tensor
from torch.nn import Identity, Module, ModuleList

from modulm.errors import UnsupportedError
from modulm.nn import Builder
from modulm_layers import size
from modulm_towers import Convolution, Pieces, Tower

__all__ = ["MobileNetConfig", "MobileNetTower"]

_EPS = 1e-6
_ARCHITECTURE = "mobilenetv5_300m_enc"
_STEM, _SIDE = 64, 16
#: Channels, heads, channels of a head, stride of keys, and pairs of blocks, of the two stages with
#: attention.
_LATE = ((640, 12, 64, 2, 14), (1280, 16, 96, 1, 19))
#: Expansions and depthwise kernels of the blocks between the first of these stages and attention.
_BEFORE_ATTENTION = (((4, 5),) * 7 + ((1, 0),), ())


@frozen(kw_only=True)
class MobileNetConfig:
    """`vision_config`. vocab_offset, vocab_size: ids of tokens that the encoder embeds. model_args:
    `channel_multiplier` scales the channels of stages, `msfa_output_resolution` is the side of the
    square of tokens.
    """

    architecture: str = _ARCHITECTURE
    hidden_size: int = size(2048)
    vocab_size: int = size(128)
    vocab_offset: int = size(262144, least=0)
    rms_norm_eps: float = _EPS
    do_pooling: bool = False
    model_args: Mapping[str, Any] | None = Factory(dict)

    def __attrs_post_init__(self) -> None:
        if self.architecture != _ARCHITECTURE:
            message = f"architecture: not supported yet: {self.architecture!r}, only "
            raise UnsupportedError(f"{message}{_ARCHITECTURE}")
        unknown = set(self.model_args or ()) - {"channel_multiplier", "msfa_output_resolution"}
        if unknown or self.do_pooling:
            name = "do_pooling" if self.do_pooling else f"model_args: {', '.join(sorted(unknown))}"
            raise UnsupportedError(f"vision_config: not supported yet: {name}")
        for name in self.model_args or {}:
            if not 0 < float(self._argument(name, 1)) < math.inf:
                raise ValueError(f"model_args: {name}: must be a positive number")

    def _argument(self, name: str, default: float) -> float:
        value = (self.model_args or {}).get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"model_args: {name}: must be a number, not {value!r}")
        return value

    @property
    def side(self) -> int:
        """The side of the square of tokens."""
        return int(self._argument("msfa_output_resolution", _SIDE))

    def channels(self, count: int) -> int:
        """Channels of a stage, a multiple of 8."""
        return _eighths(count * self._argument("channel_multiplier", 1))


def _eighths(count: float) -> int:
    """The nearest multiple of 8, at least nine tenths of `count`."""
    rounded = max(8, int(count + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * count else rounded


class _Norm(Module):
    """RMS norm over channels."""

    weight: Tensor

    def __init__(self, b: Builder, name: str, channels: int) -> None:
        super().__init__()
        b.parameter(f"{name}.weight", self, "weight", (channels,))

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, channels, height, width]."""
        wide = x.float()
        wide = wide * (wide.square().mean(1, keepdim=True) + _EPS).rsqrt()
        return wide.to(x.dtype) * self.weight[:, None, None]


class _Conv(Module):
    """Convolution, norm and, with `act`, GELU. An input of n has an output of n / stride,
    rounded up; the larger half of padding comes last.
    """

    def __init__(
        self,
        b: Builder,
        names: tuple[str, str],
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        groups: int = 1,
        act: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.act = kernel, stride, act
        name, norm = names
        self.conv = Convolution(
            b, name, inputs, outputs, (kernel, kernel), stride=stride, groups=groups, bias=bias
        )
        self.norm = _Norm(b, norm, outputs) if norm else Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, height, width] -> [n, outputs, height / stride, width / stride]."""
        pads: list[int] = []
        for length in (x.shape[3], x.shape[2]):
            last = (-(-length // self.stride) - 1) * self.stride + self.kernel
            missing = max(last - length, 0)
            pads += [missing // 2, missing - missing // 2]
        x = self.norm(self.conv(F.pad(x, pads)))
        return F.gelu(x, approximate="tanh") if self.act else x


def _named(b: Builder, name: str, *arguments: Any, **more: Any) -> _Conv:
    return _Conv(b.at(name), ("conv", "bn"), *arguments, **more)


class _Edge(Module):
    """A block whose expansion is a whole convolution."""

    def __init__(self, b: Builder, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = _eighths(4 * inputs)
        self.expand = _Conv(b, ("conv_exp", "bn1"), inputs, wide, 3, stride=stride)
        self.project = _Conv(b, ("conv_pwl", "bn2"), wide, outputs, act=False)
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.expand(x))
        return x + out if self.skips else out


class _Inverted(Module):
    """Depthwise convolution (`before`), expansion, depthwise convolution (`inside`), projection.

    scaled: whether the branch has learned factors, and is added to the stream.
    """

    factors: Tensor

    def __init__(
        self, b: Builder, inputs: int, outputs: int, expansion: int,
        before: int = 0, inside: int = 0, *, stride: int = 1, scaled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        wide = _eighths(inputs * expansion)
        parts: list[Module] = []
        if before:
            last = 1 if inside else stride
            parts.append(
                _named(b, "dw_start", inputs, inputs, before, stride=last, groups=inputs, act=False)
            )
        parts.append(_named(b, "pw_exp", inputs, wide))
        if inside:
            parts.append(_named(b, "dw_mid", wide, wide, inside, stride=stride, groups=wide))
        parts.append(_named(b, "pw_proj", wide, outputs, act=False))
        self.parts, self.scaled = ModuleList(parts), scaled
        if scaled:
            b.parameter("layer_scale.gamma", self, "factors", (outputs,))
        self.skips = scaled and inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for part in self.parts:
            out = part(out)
        if self.scaled:
            out = out * self.factors[:, None, None]
        return x + out if self.skips else out


class _Attention(Module):
    """Attention of several heads of queries to one of keys, of which some are left out."""

    factors: Tensor

    def __init__(self, b: Builder, channels: int, heads: int, head_dim: int, stride: int) -> None:
        super().__init__()
        self.heads, self.norm, at = heads, _Norm(b, "norm", channels), b.at("attn")
        self.queries = _Conv(at, ("query.proj", ""), channels, heads * head_dim, act=False)
        for name in ("key", "value"):
            part = [_Conv(at, (f"{name}.proj", ""), channels, head_dim, act=False)]
            if stride > 1:
                names = (f"{name}.down_conv", f"{name}.norm")
                part.insert(0, _Conv(at, names, channels, channels, 3, stride=stride,
                                     groups=channels, act=False))  # fmt: skip
            setattr(self, f"{name}s", ModuleList(part))
        self.out = _Conv(at, ("output.proj", ""), heads * head_dim, channels, act=False)
        b.parameter("layer_scale.gamma", self, "factors", (channels,))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q = self.queries(normed).flatten(2).unflatten(1, (self.heads, -1)).transpose(2, 3)
        keys = values = normed
        for key, value in zip(self.keys, self.values, strict=True):
            keys, values = key(keys), value(values)
        k, v = (t.flatten(2).transpose(1, 2)[:, None] for t in (keys, values))
        shape = (-1, self.heads, -1, -1)
        seen = F.scaled_dot_product_attention(q, k.expand(*shape), v.expand(*shape))
        seen = seen.transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:])
        out: Tensor = x + self.out(seen) * self.factors[:, None, None]
        return out


class MobileNetTower(Tower):
    """Encodes images of one size."""

    def __init__(self, c: MobileNetConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        few, more = c.channels(128), c.channels(256)
        stem = _STEM if c.channels(128) < 128 else c.channels(_STEM)
        self.stem = _named(b, "conv_stem", 3, stem, 3, stride=2, bias=True)
        at = b.at("blocks")
        stages: list[list[Module]] = [
            [_Edge(at.at(f"0.{i}"), few if i else stem, few, 1 if i else 2) for i in range(3)],
            [_Inverted(at.at("1.0"), few, more, 6, 3, 5, stride=2)],
        ]
        stages[1] += [
            _Inverted(at.at(f"1.{i}"), more, more, 4, kernel)
            for i, kernel in enumerate((5, 3, 5, 3), 1)
        ]
        inputs = more
        for stage, (count, heads, head_dim, stride, pairs) in enumerate(_LATE, 2):
            width, kernels = c.channels(count), _BEFORE_ATTENTION[stage - 2]
            blocks: list[Module] = [
                _Inverted(at.at(f"{stage}.0"), inputs, width, 6, 5, 5, stride=2)
            ]
            for expansion, kernel in kernels:
                place = at.at(f"{stage}.{len(blocks)}")
                blocks.append(_Inverted(place, width, width, expansion, kernel))
            for _ in range(pairs):
                place = at.at(f"{stage}.{len(blocks)}")
                blocks.append(_Attention(place, width, heads, head_dim, stride))
                blocks.append(_Inverted(at.at(f"{stage}.{len(blocks)}"), width, width, 2))
            stages.append(blocks)
            inputs = width
        self.stages = ModuleList(ModuleList(blocks) for blocks in stages)
        both = c.channels(_LATE[0][0]) + c.channels(_LATE[1][0])
        at = b.at("msfa")
        self.join = _Inverted(at.at("ffn"), both, c.hidden_size, 2, scaled=False)
        self.norm = _Norm(at, "norm", c.hidden_size)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, 3, height, width] -> [n, tokens, hidden]."""
        x, ends = self.stem(pixels.to(self.dtype)), []
        for blocks in self.stages:
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
                yield x.shape[0] * x.shape[2] * x.shape[3]
            ends.append(x)
        fine, coarse = ends[-2:]
        x = self.join(torch.cat([fine, F.interpolate(coarse, fine.shape[2:])], dim=1))
        side, shape = self.config.side, x.shape[2:]
        if tuple(shape) != (side, side):
            if any(length % side for length in shape):
                x = F.interpolate(x, (side, side), mode="bilinear")
            else:
                x = F.avg_pool2d(x, (shape[0] // side, shape[1] // side))
        tokens: Tensor = self.norm(x).flatten(2).transpose(1, 2)
        return tokens
