"""Ops in plain torch: the specification, the fallback and the oracle of every kernel.

Notation: T tokens, H hidden size, Hq query heads, Hk key and value heads, D head size. Ops with
an `out` argument fill it if it is given and return it; without it they return a new tensor.
Norms and rotations are computed in fp32 whatever the dtype of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "act_and_mul",
    "activate",
    "add",
    "add_rms_norm",
    "cast",
    "clamp",
    "each_head",
    "embedding",
    "fused_experts",
    "gated_rms_norm",
    "latent_prepare",
    "layer_norm",
    "linear",
    "moe_route",
    "multiply",
    "pack_experts",
    "pack_linear",
    "rms_norm",
    "rotary",
    "scale",
    "take_columns",
    "unpack_linear",
    "varlen_attention",
]


_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "xielu": lambda x, up, down: _xielu(x.float(), up, down).to(x.dtype),
}


def activate(x: Tensor, act: str, constants: tuple[float, ...] = ()) -> Tensor:
    """act(x) of the same shape, a new tensor.

    `act`: "gelu", "gelu_tanh", "quick_gelu" (x sigmoid(1.702 x)), "relu", "relu2" (its square),
    "sigmoid", "silu", "tanh", or, with two constants, "xielu" (Huang and Schlag, arXiv
    2411.13010): x / 2, and up x^2 above zero, down (e^x - 1 - x) below.
    """
    return _ACTIVATIONS[act](x, *constants)


def _xielu(x: Tensor, up: float, down: float) -> Tensor:
    below = torch.expm1(x.clamp(max=0)) - x
    return torch.where(x > 0, up * x * x, down * below) + 0.5 * x


def add(x: Tensor, y: Tensor, gate: Tensor | None = None) -> Tensor:
    """x + y, or x + sigmoid(gate) * y; x, y: [T, H], gate: [T, 1] -> [T, H], a new tensor."""
    return x + y if gate is None else x + torch.sigmoid(gate) * y


def multiply(x: Tensor, y: Tensor, act: str = "") -> Tensor:
    """x * act(y), both [T, H], in y's dtype; x may be fp32 where y is not."""
    factor = y.to(x.dtype)
    return (x * (activate(factor, act) if act else factor)).to(y.dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """x times a number, a new tensor of x's shape."""
    return x * factor


def clamp(x: Tensor, limit: float) -> Tensor:
    """x within [-limit, limit], a new tensor of x's shape."""
    return x.clamp(-limit, limit)


def take_columns(x: Tensor, order: Tensor) -> Tensor:
    """x: [T, K]; order: [N] int64 -> [T, N], a new tensor whose column j is x's column order[j]."""
    return x.index_select(-1, order)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, a new tensor of x's shape."""
    return x.to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension; x: [T, H], weight: [H] or None.

    Zhang and Sennrich, arXiv 1910.07467. `offset` is 1 for models that store weight - 1.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * (weight.float() + offset if offset else weight.float())
    return _deliver(wide.to(x.dtype), out)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """residual += x, in place, then the norm of residual in x's dtype. Shapes as in `rms_norm`.

    The residual may be kept in fp32.
    """
    residual += x
    return _deliver(rms_norm(residual, weight, eps, None, offset).to(x.dtype), out)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, *, norm_first: bool
) -> Tensor:
    """The norm of x * silu(gate), or that of x and then * silu(gate), over each of `groups` parts.

    x: [T, H] fp32; gate: [T, H]; weight: [H] or, for all parts alike, [H / groups] -> [T, H] in
    the gate's dtype.
    """
    factor = F.silu(gate.float())
    parts = torch.unflatten(x if norm_first else x * factor, -1, (groups, -1))
    normed = F.rms_norm(parts, parts.shape[-1:], eps=eps)
    scaled = (normed * weight.float().view(-1, parts.shape[-1])).flatten(1)
    return (scaled * factor if norm_first else scaled).to(gate.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """Ba et al., arXiv 1607.06450, over the last dimension.

    x: [T, H]; weight: [H], or [n, H] for x [T, n, H], or None; bias: [H].
    """
    wide = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        wide = wide * weight.float()
    if bias is not None:
        wide = wide + bias.float()
    return _deliver(wide.to(x.dtype), out)


def act_and_mul(x: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """act(x[:, :I]) * x[:, I:], with `activate`'s names; x: [T, 2 I] -> [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return _deliver(activate(gate, act) * up, out)


def pack_linear(weight: Tensor) -> Any:
    """The weight [N, K] in whatever form `linear` of the same provider wants; here, as it is."""
    return weight


def linear(x: Tensor, packed: Any, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x W^T + b; x: [T, K], packed: from `pack_linear`, bias: [N] -> [T, N].

    One row and many rows add up in different orders, so fp32 results differ in the last bits.
    """
    result = F.linear(x, packed, bias)
    return result if out is None else out.copy_(result)


def unpack_linear(packed: Any) -> Tensor:
    """The weight [N, K] back from its packed form."""
    weight: Tensor = packed
    return weight


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of a table; ids: [T] int64, weight: [V, H] -> [T, H]."""
    return _deliver(F.embedding(ids, weight), out)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, neox: bool = True) -> None:
    """Rotate the first R dimensions of each head, in place (Su et al., arXiv 2104.09864).

    q: [T, Hq, D]; k: [T, Hk, D]; positions: [T] int64; cos_sin: [max position, R], R <= D, whose
    first half is the cosine and second half the sine of R / 2 angles. Neox pairs dimension i with
    i + R / 2, otherwise 2 i with 2 i + 1.
    """
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    size = cos_sin.shape[-1]
    for heads in (q, k):
        part = heads[..., :size]
        first, second = (
            part.float().chunk(2, -1)
            if neox
            else torch.unflatten(part.float(), -1, (-1, 2)).unbind(-1)
        )
        turned = (first * cos - second * sin, second * cos + first * sin)
        part.copy_(torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2))


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None
) -> Tensor:
    """Rows of these lengths lie end to end, and in each all tokens see all; no cache.

    q: [tokens, heads, size]; k, v: [tokens, kv heads, size] -> as q. scale: 1 / sqrt(size) if None.
    """
    if len(set(lengths)) > 1:
        outputs, first = [], 0
        for length in lengths:
            segment = slice(first, first + length)
            outputs.append(varlen_attention(q[segment], k[segment], v[segment], [length], scale))
            first += length
        return torch.cat(outputs)
    shape = (len(lengths), -1)
    q, k, v = (t.reshape(*shape, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    seen = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    return seen.transpose(1, 2).flatten(0, 1)


def latent_prepare(
    q: Tensor,
    latents: Tensor,
    up: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """Queries and keys of latent attention: ([T, Hq, rank + R], [T, 1, rank + R]).

    q: [T, Hq, nope + R], of which the first part goes through up [Hq, nope, rank] and the second
    is rotated; latents: [T, rank + R], of which the first part is normed with weight [rank] and the
    second rotated.
    """
    rank, turned = up.shape[2], cos_sin.shape[-1]
    q_nope, q_rope = torch.split(q, [up.shape[1], turned], dim=-1)
    latent, k_rope = torch.split(latents.unsqueeze(1), [rank, turned], dim=-1)
    q_rope, k_rope = q_rope.clone(), k_rope.clone()
    rotary(q_rope, k_rope, positions, cos_sin, neox)
    queries = torch.cat([each_head(q_nope, up), q_rope], dim=-1)
    return queries, torch.cat([rms_norm(latent, weight, eps), k_rope], dim=-1)


def each_head(x: Tensor, weight: Tensor) -> Tensor:
    """A linear map for each head; x: [T, Hq, n], weight: [Hq, n, m] -> [T, Hq, m]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalise: bool = True,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: ([T, top_k] fp32, [T, top_k] int64).

    logits: [T, experts]. scoring: "softmax" or "sigmoid" over all experts, in fp32. `bias`
    [experts] is added for choosing only (DeepSeek-V3, arXiv 2412.19437). With `groups` > 1 only
    experts of the best `top_groups` groups are chosen, a group's score being its best expert's
    ("max") or the sum of its two best ("top2"). `renormalise` makes the weights sum to `scale`.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    ranking = scores if bias is None else scores + bias.float()
    if groups > 1:
        grouped = torch.unflatten(ranking, -1, (groups, -1))
        best = grouped.amax(-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        selected = torch.zeros_like(best, dtype=torch.bool)
        selected.scatter_(1, best.topk(top_groups, dim=-1).indices, True)
        ranking = grouped.masked_fill(~selected.unsqueeze(-1), -torch.inf).flatten(1)
    ids = ranking.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids


def pack_experts(weight: Tensor, parts: int = 1) -> Any:
    """A stack [experts, N, K] in whatever form `fused_experts` wants; here, as it is.

    Whatever the form, `stack[e]` is the weight [N, K] of expert e. N consists of `parts` equal
    pieces (2: gate and up) that are read side by side.
    """
    return weight


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Any,
    down: Any,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts, each down(act(gate_up(x))); -> [T, H].

    x: [T, H]; weights, ids: from `moe_route`; gate_up, down: stacks of [2 I, H] and [H, I] from
    `pack_experts`, or anything that gives the weight of one expert by index; their biases:
    [experts, 2 I] and [experts, H]. `act`: "silu", "gelu" or "gelu_tanh" of the gate times up, or
    "clamped_swiglu": (up + 1) gate sigmoid(alpha gate) with gate <= limit and |up| <= limit.

    A token's experts are added in the order of their index, in fp32.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        both = F.linear(
            x[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]
        )
        gate, up = both.chunk(2, dim=-1)
        inner = _gated(gate, up, act, alpha, limit)
        output = F.linear(inner, down[expert], None if down_bias is None else down_bias[expert])
        total.index_add_(0, rows, output.float() * weights[rows, choices, None])
    return total.to(x.dtype)


def _gated(gate: Tensor, up: Tensor, act: str, alpha: float, limit: float) -> Tensor:
    if act == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if act == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none") * up


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
