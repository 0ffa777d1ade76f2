"""The table of ops that layers, quantization methods and attention backends call.

`modulm.ops` binds each op once, when a model is built, to a kernel provider (`contracts.kernels`)
or to its twin in plain torch. Twins specify what an op computes, including shapes and rounding.
Libraries add twins of their own (group `modulm.ops`: the op's name and its twin).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from modulm.contracts.state import StatePlan

__all__ = ["API", "Op", "Ops"]

API = 1

Op = Callable[..., Any]

Forward = TypeVar("Forward", bound=Callable[..., Any])


class Ops(Protocol):
    """Ops by attribute: `ops.rms_norm(x, weight, eps)` calls the implementation bound at startup.

    The ops declared here have twins. Those up to `top_logprobs` are in `modulm.ops` and always
    bound; the others are in modulm-layers and modulm-adapters. Kernel providers may have more ops;
    `find` returns such an op, or None. providers: op -> who computes it ("torch" for a twin).
    refusals: op -> why a better provider was not used.
    """

    providers: Mapping[str, str]
    refusals: Mapping[str, str]

    def supports(self, name: str) -> bool:
        """Whether an op of this name is bound."""

    def find(self, name: str) -> Op | None:
        """Return the op of this name, or None if no provider has it."""

    def recorded(self, forward: Forward) -> Forward:
        """Wrap `forward` so that steps are recorded and replayed, if a provider or platform can."""

    # fmt: off
    def activate(self, x: Tensor, act: str, constants: tuple[float, ...] = ()) -> Tensor: ...
    def add(self, x: Tensor, y: Tensor, gate: Tensor | None = None) -> Tensor: ...
    def multiply(self, x: Tensor, y: Tensor, act: str = "") -> Tensor: ...
    def scale(self, x: Tensor, factor: float) -> Tensor: ...
    def clamp(self, x: Tensor, limit: float) -> Tensor: ...
    def take_columns(self, x: Tensor, order: Tensor) -> Tensor: ...
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...
    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float,
        out: Tensor | None = None, offset: float = 0.0,
    ) -> Tensor: ...
    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, *, norm_first: bool,
    ) -> Tensor: ...
    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def act_and_mul(self, x: Tensor, act: str, out: Tensor | None = None) -> Tensor: ...
    def pack_linear(self, weight: Tensor) -> Any: ...
    def linear(
        self, x: Tensor, packed: Any, bias: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor: ...
    def unpack_linear(self, packed: Any) -> Tensor: ...
    def embedding(self, ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor: ...
    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, neox: bool = True,
    ) -> None: ...
    def varlen_attention(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None,
    ) -> Tensor: ...
    def latent_prepare(
        self, q: Tensor, latents: Tensor, up: Tensor, weight: Tensor, eps: float, cos_sin: Tensor,
        positions: Tensor, neox: bool = True,
    ) -> tuple[Tensor, Tensor]: ...
    def each_head(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def moe_route(
        self, logits: Tensor, top_k: int, *, scoring: str = "softmax", renormalise: bool = True,
        bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_score: str = "max",
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]: ...
    def pack_experts(self, weight: Tensor, parts: int = 1) -> Any: ...
    def fused_experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Any, down: Any, *,
        act: str = "silu", alpha: float = 1.0, limit: float = 0.0,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor: ...
    def uniforms(self, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray: ...
    def argmax(self, logits: Tensor) -> Tensor: ...
    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor: ...
    def sample_blind(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
        min_p: Tensor | None, uniform: Tensor,
    ) -> Tensor: ...
    def filter_logits(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    ) -> Tensor: ...
    def apply_penalties(
        self, logits: Tensor, indices: Tensor, ids: Tensor, counts: Tensor, repetition: Tensor,
        frequency: Tensor, presence: Tensor,
    ) -> None: ...
    def apply_bitmask(self, logits: Tensor, indices: Tensor, mask: Tensor) -> None: ...
    def top_logprobs(
        self, values: Tensor, chosen: Tensor, k: int, normalise: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor,
        plan: StatePlan,
    ) -> Tensor: ...
    def selective_scan(
        self, x: Tensor, step: Tensor, a_log: Tensor, b: Tensor, c: Tensor, skip: Tensor,
        states: Tensor, plan: StatePlan, bias: Tensor | None = None,
        limit: tuple[float, float] = (0.0, inf),
    ) -> Tensor: ...
    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, step: Tensor, a_log: Tensor,
        bias: Tensor, states: Tensor, plan: StatePlan, reach: float = 1.0,
    ) -> Tensor: ...
    def add_lora(self, out: Tensor, x: Tensor, groups: Any, table: Any) -> None: ...

    # No twin: check `supports` first.
    def embedding_packed(
        self, ids: Tensor, packed: Any, dtype: torch.dtype | None = None,
    ) -> Tensor: ...
    # fmt: on
