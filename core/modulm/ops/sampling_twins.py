"""Sampling in plain torch: the specification of the sampling ops that kernels may replace.

Every op works row by row: a row's result does not depend, to the bit, on the other rows.
Sums over the vocabulary are running sums in fp64 in token order, because a plain `sum` is split
over threads differently for one row and for many.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = [
    "apply_bitmask",
    "apply_penalties",
    "argmax",
    "filter_logits",
    "sample",
    "sample_blind",
    "top_logprobs",
    "uniforms",
]

#: Initial number of best logits to consider for top-p; widened if they do not reach p.
_FIRST_LOOK = 128


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One random number in [0, 1) per row, from its seed and the position it samples.

    seeds: [rows] int64; positions: [rows] int64 -> [rows] float64. This is output number
    `position` of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started at the scrambled seed:
    a counter-based generator, so no state has to be kept, moved or replayed.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _scramble(seeds.astype(np.uint64) + gamma)
        mixed = _scramble(state + (positions.astype(np.uint64) + np.uint64(1)) * gamma)
    unit: np.ndarray = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit


def _scramble(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits: [rows, vocabulary], any float dtype -> [rows] int64, the lowest id among equals.

    -1 where the greatest logit is not finite: NaN (which counts as greatest), inf, or all -inf.
    """
    best, ids = logits.max(dim=-1)
    return torch.where(best.isfinite(), ids, -1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row; [rows] int64, -1 where the greatest logit is not finite.

    logits: [rows, vocabulary] fp32, left as they are. temperature: [rows] fp32, 0 takes the
    argmax. top_k: [rows] int32, 0 is off. top_p: [rows] fp32, 1 is off. min_p: [rows] fp32, 0 is
    off. uniform: [rows] fp64 in [0, 1). The token is the first one, in the order of ids, at
    which the running sum of the kept probabilities exceeds `uniform` times their total.
    """
    chosen = argmax(logits)
    drawn = ((temperature > 0) & (chosen >= 0)).nonzero().flatten()
    if len(drawn) == 0:
        return chosen
    filtered = filter_logits(
        logits[drawn], temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn]
    )
    running = _weights(filtered).cumsum(dim=-1)
    target = uniform[drawn, None] * running[:, -1:]
    chosen[drawn] = torch.searchsorted(running, target, right=True).flatten()
    return chosen


def sample_blind(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """`sample` for devices that queue work: the host reads no values, so it does not wait.

    A filter that is off for all rows is None.
    """
    chosen = argmax(logits)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if min_p is not None:
        floor = scaled.amax(dim=-1) + min_p.log()
        scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
    if top_k is not None or top_p is not None:
        ordered = scaled.sort(dim=-1, descending=True).values
        if top_k is not None:
            last = (top_k.clamp(1, scaled.shape[-1]).long() - 1)[:, None]
            floor = torch.where(top_k > 0, ordered.gather(1, last).flatten(), -torch.inf)
            scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
            ordered.masked_fill_(ordered < floor[:, None], -torch.inf)
        if top_p is not None:
            mass = top_p.double() * _weights(scaled).cumsum(dim=-1)[:, -1]
            running = (ordered - ordered[:, :1]).double().exp().cumsum(dim=-1)
            last = torch.searchsorted(running, mass[:, None]).clamp(max=scaled.shape[-1] - 1)
            floor = torch.where(top_p < 1, ordered.gather(1, last).flatten(), -torch.inf)
            scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
    running = _weights(scaled).cumsum(dim=-1)
    target = uniform[:, None] * running[:, -1:]
    drawn = torch.searchsorted(running, target, right=True).flatten()
    return torch.where((temperature > 0) & (chosen >= 0), drawn, chosen)


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Divide logits by the temperature and set those dropped by min-p, top-k and top-p to -inf.

    Arguments as in `sample`, temperatures > 0 -> [rows, vocabulary] fp32, new. The three filters
    are thresholds, applied in this order; tokens that equal the last one kept are kept as well.
    """
    scaled = logits / temperature[:, None]
    if bool((min_p > 0).any()):
        floor = scaled.amax(dim=-1) + min_p.log()
        scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
    if bool((top_k > 0).any()):
        scaled.masked_fill_(scaled < _top_k_floor(scaled, top_k)[:, None], -torch.inf)
    limited = (top_p < 1).nonzero().flatten()
    if len(limited):
        some = scaled[limited]
        floor = _top_p_floor(some, top_p[limited])
        scaled[limited] = some.masked_fill_(some < floor[:, None], -torch.inf)
    return scaled


def _top_k_floor(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the k-th greatest value of each row: [rows], -inf if top-k is off."""
    vocabulary = scaled.shape[-1]
    limits = torch.where(top_k > 0, top_k.clamp(max=vocabulary), 1).long()
    best = scaled.topk(int(limits.max()), dim=-1).values
    floor = best.gather(1, limits[:, None] - 1).flatten()
    return torch.where(top_k > 0, floor, -torch.inf)


def _top_p_floor(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest value among the fewest best tokens that reach probability p: [rows]."""
    vocabulary = scaled.shape[-1]
    peak = scaled.amax(dim=-1, keepdim=True)
    total = _weights(scaled).cumsum(dim=-1)[:, -1]
    mass = top_p.double() * total
    look = min(_FIRST_LOOK, vocabulary)
    while True:
        best = scaled.topk(look, dim=-1).values
        running = (best - peak).double().exp().cumsum(dim=-1)
        if look == vocabulary or bool((running[:, -1] >= mass).all()):
            break
        look = min(look * 8, vocabulary)
    last = torch.searchsorted(running, mass[:, None]).clamp(max=look - 1)
    return best.gather(1, last).flatten()


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """Return unnormalized probabilities: [rows, vocabulary] fp64, 1 for the best token."""
    return (scaled - scaled.amax(dim=-1, keepdim=True)).double().exp()


def apply_penalties(
    logits: torch.Tensor,
    indices: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Repetition, then frequency, then presence penalty, in place.

    logits: [rows, vocabulary] fp32. The other arguments are [n], one entry for each token that a
    penalised row has seen, no (index, id) twice: indices int64 is the row of `logits`, ids int64
    the token, counts fp32 how often it stands in the output (0: only in the prompt), and the
    row's three penalties fp32. Repetition divides positive and multiplies negative logits
    (Keskar et al., arXiv 1909.05858); the others subtract (as OpenAI's API documents them).
    """
    seen = logits[indices, ids]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen = seen - frequency * counts - presence * (counts > 0)
    logits[indices, ids] = seen


def apply_bitmask(logits: torch.Tensor, indices: torch.Tensor, mask: torch.Tensor) -> None:
    """Set forbidden tokens to -inf in place.

    logits: [rows, vocabulary]; indices: [n] int64, distinct rows of it; mask: [n, ceil(vocabulary /
    32)] int32, bit i of word j set: token 32 j + i is allowed.
    """
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = (mask[:, :, None] >> bits) & 1
    allowed = allowed.flatten(1)[:, : logits.shape[-1]].bool()
    logits[indices] = logits[indices].masked_fill_(~allowed, -torch.inf)


def top_logprobs(
    values: torch.Tensor, chosen: torch.Tensor, k: int, normalise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the chosen token and the k best ones of each row.

    values: [rows, vocabulary] fp32, logits; chosen: [rows] int64 ->
    (ids [rows, 1 + k] int64, values [rows, 1 + k] fp32, rank [rows] int64), the chosen token in
    front, then best first. The rank is 1 + the number of tokens with a greater value. `normalise`
    gives log probabilities instead of logits.
    """
    values = values.log_softmax(dim=-1) if normalise else values
    own = values.gather(1, chosen[:, None])
    best, ids = values.topk(min(k, values.shape[-1]), dim=-1)
    rank = (values > own).sum(dim=-1) + 1
    return torch.cat([chosen[:, None], ids], 1), torch.cat([own, best], 1), rank
