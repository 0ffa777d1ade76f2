"""Causal layers that decode a sound frame by frame, in float32.

Each convolution and each attention layer carries its last inputs over to the next call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder

__all__ = [
    "CausalConvolution",
    "CausalDecoder",
    "CausalUpsampling",
    "Float32Module",
    "Past",
    "Window",
]


@define(eq=False)
class Past:
    """What layers carry over between calls, in the order in which they run.

    before: of the last call, None in the first. after: for the next one.
    """

    before: list[Tensor] | None
    after: list[Tensor] = field(factory=list)

    @property
    def begins(self) -> bool:
        """Whether this is the first call."""
        return self.before is None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return the next tensor of the last call; zeros in the first one."""
        return like.new_zeros(shape) if self.before is None else self.before[len(self.after)]

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor for the next call."""
        self.after.append(tensor)


class Float32Module(Module):
    """A layer with parameters in float32."""

    weight: Tensor
    bias: Tensor

    def add(self, b: Builder, name: str, attribute: str, *shape: int) -> None:
        """Add a parameter, stored as `name`."""
        b.parameter(name, self, attribute, shape, torch.float32)


class CausalConvolution(Float32Module):
    """A convolution over what came before."""

    def __init__(
        self, b: Builder, name: str, inputs: int, outputs: int, kernel: int, dilation: int = 1,
        groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dilation, self.past, self.groups = dilation, (kernel - 1) * dilation, groups
        self.add(b, f"{name}.conv.weight", "weight", outputs, inputs // groups, kernel)
        self.add(b, f"{name}.conv.bias", "bias", outputs)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """[n, inputs, time] -> [n, outputs, time]."""
        if self.past:
            x = torch.cat([past.take(x, len(x), x.shape[1], self.past), x], 2)
            past.keep(x[..., -self.past :])
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation, groups=self.groups)


class CausalUpsampling(Float32Module):
    """A transposed convolution, whose kernel is two strides long by default.

    late: drop the samples before the kernel's second stride, once, at the sound's beginning.
    """

    def __init__(
        self, b: Builder, name: str, inputs: int, outputs: int, stride: int, groups: int = 1,
        *, bias: bool = True, kernel: int | None = None, late: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        kernel = 2 * stride if kernel is None else kernel
        self.stride, self.groups, self.biased, self.late = stride, groups, bias, late
        self.overlap = kernel - stride
        self.add(b, f"{name}.conv.weight", "weight", inputs, outputs // groups, kernel)
        if bias:
            self.add(b, f"{name}.conv.bias", "bias", outputs)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """[n, inputs, time] -> [n, outputs, time * stride], less at the beginning if `late`."""
        y = F.conv_transpose1d(x, self.weight, None, self.stride, groups=self.groups)
        if over := self.overlap:
            y[..., :over] += past.take(y, len(y), y.shape[1], over)
            past.keep(y[..., -over:])
            y = y[..., :-over]
            if self.late and past.begins:
                y = y[..., over:]
        return y + self.bias[:, None] if self.biased else y


@frozen(eq=False)
class Window:
    """Positions of a call's tokens, for attention to the last `size` tokens.

    cos, sin: [n, 1, time, head_dim / 2]. mask: [n, 1, time, size - 1 + time].
    """

    size: int
    cos: Tensor
    sin: Tensor
    mask: Tensor

    @classmethod
    def of(cls, x: Tensor, past: Past, size: int, head_dim: int, theta: float) -> Self:
        """Make the window for x: [n, time, hidden]; called once per call."""
        first = past.take(x, len(x), 1)
        time = torch.arange(x.shape[1], device=x.device)
        past.keep(first + x.shape[1])
        positions = first + time
        # Keys of earlier calls end where this one begins; a sound has none before its beginning.
        keys = first + torch.arange(1 - size, x.shape[1], device=x.device)
        distance = positions[:, :, None] - keys[:, None]
        mask = (keys[:, None] >= 0) & (distance >= 0) & (distance < size)
        pairs = torch.arange(0, head_dim, 2, device=x.device) / head_dim
        angles = (positions[..., None] / theta**pairs)[:, None]
        return cls(size, angles.cos(), angles.sin(), mask[:, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        """q, k, v: [n, heads, time, head_dim] -> [n, time, heads * head_dim]."""
        q, k = self._turned(q), self._turned(k)
        keys, values = (self._with_earlier(new, past) for new in (k, v))
        seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)
        return seen.transpose(1, 2).flatten(2)

    def _with_earlier(self, new: Tensor, past: Past) -> Tensor:
        n, heads, _, width = new.shape
        whole = torch.cat([past.take(new, n, heads, self.size - 1, width), new], 2)
        past.keep(whole[:, :, whole.shape[2] - self.size + 1 :])
        return whole

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos, self.sin
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class CausalDecoder(Module, ABC):
    """Turns frames of codes into sound, and keeps what it needs of earlier frames."""

    @abstractmethod
    def sound(self, frames: Tensor, past: Past) -> Tensor:
        """[n, frames, codebooks] -> [n, samples]."""

    def forward(
        self, frames: Tensor, states: Sequence[list[Tensor] | None]
    ) -> tuple[Sequence[Tensor], Sequence[list[Tensor]]]:
        """See `SpeakingModel.decode`. A state has a tensor of shape [1, ...] per layer."""
        begins = [index for index, state in enumerate(states) if state is None]
        others = [index for index, state in enumerate(states) if state is not None]
        done: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for places in (begins, others):
            if places:
                part = frames if len(places) == len(states) else frames[places]
                known = [state for index in places if (state := states[index]) is not None]
                past = Past([torch.cat(each) for each in zip(*known, strict=True)] or None)
                sound = self.sound(part, past)
                split = [tensor[:, None].unbind() for tensor in past.after]
                for place, (index, wave) in enumerate(zip(places, sound, strict=True)):
                    done[index] = wave, [each[place].clone() for each in split]
        waves, following = zip(*(done[index] for index in range(len(states))), strict=True)
        return waves, following
