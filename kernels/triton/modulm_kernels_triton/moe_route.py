"""Expert routing: one program per token, without sorting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import launch, power_of_two
from modulm_kernels_triton.weights import need

__all__ = ["OPS"]

_SCORINGS, _GROUP_SCORES = ("softmax", "sigmoid"), ("max", "top2")


@triton.jit
def _first_best(values, at, far):
    """Return (the maximum, the lowest index that has it)."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, at, far), 0)


@triton.jit
def _kept_groups(
    ranking, number, known, top_groups, groups, TOP2: tl.constexpr, BG: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Return ranking [BG, BE], -inf outside the best groups."""
    at = tl.arange(0, BE)
    score = tl.max(ranking, 1)
    if TOP2:
        best_at = tl.min(tl.where(ranking == score[:, None], at[None, :], BE), 1)
        score += tl.max(tl.where(at[None, :] == best_at[:, None], float("-inf"), ranking), 1)
    number = tl.arange(0, BG)
    score = tl.where(number < groups, score, float("-inf"))
    chosen = number < 0
    for _ in range(top_groups):
        left = tl.where(chosen, float("-inf"), score)
        # A group may hold only -inf: then the first remaining one is chosen.
        best_group = tl.min(tl.where((left == tl.max(left, 0)) & (chosen == 0), number, BG), 0)
        chosen = chosen | (number == best_group)
    return tl.where(chosen[:, None] & known, ranking, float("-inf"))


@triton.jit
def _moe_route(
    logits, row_stride, bias, weights, ids, size, top_k, groups, top_groups, scale,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALISE: tl.constexpr, TOP2: tl.constexpr,
    GROUPS: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BG)[:, None], tl.arange(0, BE)[None, :]
    number = group * size + member
    known = (group < groups) & (member < size)
    wide = tl.load(logits + row * row_stride + number, known, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-wide))
    else:
        powers = tl.exp(wide - tl.max(tl.max(wide, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    ranking = scores
    if BIAS:
        ranking += tl.load(bias + number, known, other=0.0).to(tl.float32)
    ranking = tl.where(known, ranking, float("-inf"))
    if GROUPS:
        ranking = _kept_groups(ranking, number, known, top_groups, groups, TOP2, BG, BE)
    flat, scores = tl.reshape(ranking, (BG * BE,)), tl.reshape(scores, (BG * BE,))
    at, far = tl.arange(0, BG * BE), BG * BE
    slot = tl.arange(0, BK)
    chosen = tl.zeros((BK,), tl.int32)
    top_weights = tl.zeros((BK,), tl.float32)
    for i in range(top_k):
        _, first = _first_best(flat, at, far)
        here = tl.sum(tl.where(at == first, scores, 0.0), 0)
        top_weights = tl.where(slot == i, here, top_weights)
        chosen = tl.where(slot == i, first // BE * size + first % BE, chosen)
        flat = tl.where(at == first, float("-inf"), flat)
    if RENORMALISE:
        top_weights = top_weights / tl.sum(top_weights, 0)
    inside = slot < top_k
    tl.store(weights + row * top_k + slot, top_weights * scale, inside)
    tl.store(ids + row * top_k + slot, chosen.to(tl.int64), inside)


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
    """The op `moe_route`; ties are broken by the lowest expert."""
    rows, experts = logits.shape
    need(scoring in _SCORINGS, f"scoring must be one of {_SCORINGS}, not {scoring!r}")
    need(group_score in _GROUP_SCORES, f"group_score must be one of {_GROUP_SCORES}")
    need(experts % groups == 0, f"groups {groups} must divide {experts} experts")
    need(0 < top_groups <= groups, f"top_groups must lie in 1..{groups}, not {top_groups}")
    most = experts // groups * top_groups
    need(0 < top_k <= most, f"top_k must lie in 1..{most}, not {top_k}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    each = experts // groups
    launch(
        _moe_route, (rows,),
        logits, logits.stride(0), logits if bias is None else bias.contiguous(), weights, ids,
        each, top_k, groups, top_groups, scale,
        SIGMOID=scoring == "sigmoid", BIAS=bias is not None, RENORMALISE=renormalise,
        TOP2=group_score == "top2", GROUPS=groups > 1,
        BG=power_of_two(groups), BE=power_of_two(each), BK=power_of_two(top_k), num_warps=1,
    )  # fmt: skip
    return weights, ids


OPS = {"moe_route": moe_route}
