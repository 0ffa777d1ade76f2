"""Attention over our blocks in the place of transformers'.

The library lets attention functions be replaced by name. Ours gets the queries, keys and values of
a step with concatenated rows, writes the cache and attends over each row's own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionBackend, AttentionInputs, AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder
from modulm_transformers.kept_scales import KeptScales

__all__ = [
    "NAME",
    "AttentionStep",
    "AttentionTrace",
    "Layers",
    "Turn",
    "check_arguments",
    "register_attention",
]

#: The name under which our attention function is registered in transformers.
NAME = "modulm"
#: Tensor arguments of attention that are known from the step and can be ignored.
_HARMLESS = frozenset({"cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "position_ids"})


#: The identity of an attention module -> the cache and backend of each time it attends in a step.
Layers = dict[int, list[tuple[int, AttentionBackend]]]


class AttentionTrace:
    """Registers a cache for each attention layer, in the order in which they run.

    build: None registers none.
    """

    def __init__(self, build: Builder | None) -> None:
        self.build = build
        self.layers: Layers = {}

    def attend(
        self, module: Module, q: Tensor, k: Tensor, v: Tensor, request: _AttentionRequest
    ) -> Tensor:
        """Attend without a cache: q, k, v: [1, heads, tokens, size] -> [1, tokens, heads, value
        size].
        """
        if self.build is not None:
            self._register(self.build, module, (q, k, v), request)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=request.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def _register(
        self,
        build: Builder,
        module: Module,
        qkv: tuple[Tensor, Tensor, Tensor],
        request: _AttentionRequest,
    ) -> None:
        q, k, v = qkv
        spec = AttentionSpec(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[-1],
            value_dim=v.shape[-1] if v.shape[-1] != q.shape[-1] else None,
            scale=request.scale,
            dtype=build.dtype,
            kv_dtype=build.shared.kv_dtype,
            window=request.window,
            softcap=request.softcap,
            sinks=request.sinks is not None,
            scales=build.shared.kv_dtype.startswith("float8"),
        )
        at = build.at(f"layers.{getattr(module, 'layer_idx', len(self.layers))}")
        self.layers.setdefault(id(module), []).append(at.attention_cache(spec))


@frozen(eq=False)
class Turn:
    """The rotation of a step's tokens: rows of a table.

    cos_sin: [rows, R] fp32, as for the op `rotary`. positions: [tokens] int64.
    """

    cos_sin: Tensor
    positions: Tensor


class AttentionStep:
    """One step of the engine, as the attention function sees it."""

    def __init__(
        self,
        batch: Batch,
        layers: Layers,
        scales: KeptScales,
    ) -> None:
        self.batch, self.layers, self.scales = batch, layers, scales
        self.turns: dict[int, int] = {}
        #: The latest angles that the model computed in this step, and the table made of them.
        self.rotated: tuple[Tensor, bool, Turn] | None = None

    def place(self, module: Module) -> tuple[int, AttentionBackend]:
        """The cache and backend of a module's next turn in this step."""
        caches = self.layers[id(module)]
        turn = 0
        if len(caches) > 1:
            turn = self.turns.get(id(module), 0)
            self.turns[id(module)] = turn + 1
        return caches[turn]

    def turn(self, angles: tuple[Tensor, Tensor], *, halved: bool) -> Turn:
        """The rotation by a model's own cosines and sines, [1, tokens, R] each, whose halves are
        equal (`halved`), or whose pairs are.
        """
        cos, sin = angles
        last = self.rotated
        if last is not None and last[0] is cos and last[1] == halved:
            return last[2]
        size = cos.shape[-1] // 2
        own = slice(0, size) if halved else slice(0, None, 2)
        table = torch.cat((cos[0, :, own], sin[0, :, own]), -1).float()
        turn = Turn(table, torch.arange(len(table), device=table.device))
        self.rotated = cos, halved, turn
        return turn

    def attend(
        self, module: Module, q: Tensor, k: Tensor, v: Tensor, request: _AttentionRequest
    ) -> Tensor:
        """Shapes as in `AttentionTrace.attend`; attends over each row's own cache."""
        cache, backend = self.place(module)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        batch = self.batch
        pair = self.scales.of(id(module), k, v) if backend.spec.scales else (None, None)
        inputs = AttentionInputs(sinks=request.sinks, k_scale=pair[0], v_scale=pair[1])
        backend.forward(q, k, v, batch.caches[cache], batch.plan(cache), out, inputs)
        return out[None]


class _AttentionRequest:
    """Attention settings that a model passes besides queries, keys and values."""

    def __init__(
        self, scale: float, window: int | None, softcap: float, sinks: Tensor | None
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks


def _attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    modulm: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Our attention function, with the arguments of transformers' models.

    Raises UnsupportedError for arguments that would change the result and are not supported.
    """
    check_arguments(module, attention_mask, modulm, {**more, "is_causal": is_causal})
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.float()
    request = _AttentionRequest(scale, sliding_window or None, softcap or 0.0, sinks)
    return modulm.attend(module, query, key, value, request), None


def check_arguments(
    module: Module, attention_mask: Tensor | None, step: Any, more: Mapping[str, Any]
) -> None:
    """Raise UnsupportedError for arguments of attention that would change the result.

    step: ours, which the model's code must have passed on.
    """
    name = type(getattr(module, "module", module)).__name__
    if step is None:
        raise UnsupportedError(f"{name} drops the arguments meant for attention")
    if attention_mask is not None:
        raise UnsupportedError(f"{name} builds its own mask")
    for key, argument in more.items():
        if isinstance(argument, Tensor) and key not in _HARMLESS:
            raise UnsupportedError(f"{name}: not supported yet: attention argument {key}")
    causal = more.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedError(f"{name} uses bidirectional attention")


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the backend masks by rows and positions."""
    return


def register_attention() -> None:
    """Register our attention in transformers; may be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
