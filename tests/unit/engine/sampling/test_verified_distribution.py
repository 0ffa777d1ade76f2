"""Verified drafts leave the distribution of sampled tokens as it is, whatever is drafted.

A model over 32 tokens, whose next token depends on the last one alone, so that the distribution at
every place is known exactly. 20,000 draws, compared by Pearson's chi-squared test.
"""

from __future__ import annotations

import numpy as np
import torch
from samples import parametrize_sample

from modulm.contracts.executor import RowStart
from modulm.contracts.sampling import SamplingParams
from modulm.engine.sampling.logits_processors import Processors
from modulm.engine.sampling.sampler import Sampler
from modulm.ops import bind
from modulm.plugins import manager

V, ROWS, STEPS = 32, 500, 40
LAST = 7
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5
#: Probability 1e-5 of a greater sum of squares, by degrees of freedom (Wilson and Hilferty 1931).
BEYOND = 4.265


def bound(freedom: int) -> float:
    return float(freedom * (1 - 2 / (9 * freedom) + BEYOND * (2 / (9 * freedom)) ** 0.5) ** 3)


def chi_squared(tokens: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """(sum of squares, degrees of freedom); tokens that cannot be must not be."""
    counts = np.bincount(tokens, minlength=V)
    assert not counts[expected == 0].any()
    often = expected * len(tokens) >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * len(tokens)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def most_probable(last: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return TABLE[last].argmax(-1).numpy()


def least_probable(last: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return TABLE[last].argmin(-1).numpy()


def random_one(last: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return draw.integers(0, V, len(last))


def sampled_one(last: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """By the model's own distribution."""
    noise = draw.gumbel(size=(len(last), V))
    return (TABLE[last].numpy() + noise).argmax(-1)


def probabilities(last: int, params: SamplingParams) -> np.ndarray:
    """What the next token's are, computed apart from the engine."""
    x = TABLE[last].double() / params.temperature
    p = x.softmax(-1)
    order = p.argsort(descending=True)
    kept = torch.ones(V, dtype=torch.bool)
    if params.top_k > 0:
        kept[order[params.top_k :]] = False
    if params.top_p < 1:
        within = (p * kept / (p * kept).sum())[order].cumsum(0)
        kept[order[1:][within[:-1] >= params.top_p]] = False
    p = torch.where(kept, p, 0)
    return (p / p.sum()).numpy()


@parametrize_sample("draft", [most_probable, least_probable, random_one, sampled_one], every=4)
@parametrize_sample(
    ("more", "history"),
    [
        ({}, False),
        ({}, True),
        ({"temperature": 0.6, "top_p": 0.8}, False),
        ({"temperature": 1.5, "top_k": 6}, False),
    ],
    every=2,
)
def test_the_distribution_stays(draft, more, history) -> None:
    params = SamplingParams(**{"temperature": 1.0, **more})
    # A word of two tokens that is never begun: the row keeps a history, and nothing is banned.
    words = {"bad_words": ((V - 1, V - 1),)} if history else {}
    platform = manager.current().load("platforms", "cpu")()
    sampler = Sampler(
        bind(), platform, vocabulary=V, rows=ROWS, mode="raw_logprobs", processors=Processors(())
    )
    draw = np.random.default_rng(3)
    first, second = [], []
    last = np.full(ROWS, LAST)
    for step in range(STEPS):
        for row in range(ROWS):
            start = RowStart(
                row, f"r{row}", params, np.array([LAST]), np.zeros(0, np.int64),
                int(draw.integers(2**62)), **words,
            )  # fmt: skip
            sampler.admit(start, params, None)
        one = draft(last, draw)
        two = draft(one, draw)
        logits = torch.stack([TABLE[last], TABLE[one], TABLE[two]], 1).reshape(-1, V)
        found = sampler.verify(
            np.arange(ROWS), np.full(ROWS, 1 + step), logits, list(np.stack([one, two], 1))
        )
        runs = np.split(found.tokens, found.accepted.cumsum()[:-1])
        first += [run[0] for run in runs]
        second += [(run[0], run[1]) for run in runs if len(run) > 1]
        for row in range(ROWS):
            sampler.release(row)
    assert len(first) == 20_000
    squares, freedom = chi_squared(np.array(first), probabilities(LAST, params))
    assert squares < bound(freedom)
    # What follows an accepted draft is distributed as after any other token.
    for token in {before for before, _ in second}:
        after = np.array([now for before, now in second if before == token])
        if len(after) >= 500:
            squares, freedom = chi_squared(after, probabilities(token, params))
            assert squares < bound(freedom)
    if draft is most_probable:
        assert len(second) > 1500


def test_a_rule_that_favours_drafts_is_found_out() -> None:
    """The test can fail: draws of which one in fifty is replaced by the draft."""
    params = SamplingParams(temperature=1.0)
    expected = probabilities(LAST, params)
    draw = np.random.default_rng(4)
    tokens = draw.choice(V, 20_000, p=expected)
    squares, freedom = chi_squared(tokens, expected)
    assert squares < bound(freedom)
    tokens[draw.random(20_000) < 0.02] = int(expected.argmin())
    squares, freedom = chi_squared(tokens, expected)
    assert squares > bound(freedom)
