"""Rows whose drafts are trees get the tokens of single steps, whatever the trees are.

A model over 24 tokens, whose next token depends on the last one alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from attrs import evolve

from modulm.contracts.executor import RowStart
from modulm.contracts.sampling import SamplingParams
from modulm.engine.sampling.logits_processors import Processors
from modulm.engine.sampling.sampler import Sampler
from modulm.ops import bind
from modulm.plugins import manager

V, LENGTH = 24, 40
STOP = 23
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(2)) * 1.5
STARTS = (3, 11, 7, 19)
#: By row: greedy, drawn, with a history, and with a token that ends the row.
PARAMS = (
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.95),
    SamplingParams(temperature=1.1, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=1.5, presence_penalty=0.2),
)


def a_sampler(rows: Sequence[int] = range(4)) -> Sampler:
    platform = manager.current().load("platforms", "cpu")()
    sampler = Sampler(
        bind(), platform, vocabulary=V, rows=4, mode="raw_logprobs", processors=Processors(())
    )
    for row in rows:
        start = RowStart(
            row, f"r{row}", PARAMS[row], np.array([STARTS[row]]), np.zeros(0, np.int64), 100 + row,
            stop_ids=(STOP,) if row == 3 else (),
        )  # fmt: skip
        sampler.admit(start, PARAMS[row], None)
    return sampler


@pytest.fixture(scope="module")
def plain() -> tuple[np.ndarray, list[list[tuple[list[int], list[float]]]]]:
    """Tokens and log probabilities of single steps: [rows, LENGTH]."""
    sampler, tokens, entries = a_sampler(), [list(STARTS)], []
    for step in range(LENGTH):
        chosen = sampler.sample(np.arange(4), np.full(4, 1 + step), TABLE[tokens[-1]].clone())
        sampled = chosen.result()
        tokens.append(sampled.tokens.tolist())
        entries.append([values(sampled.logprobs.get(row)) for row in range(4)])
    return np.array(tokens[1:]).T, [list(each) for each in zip(*entries, strict=True)]


def values(entry: object) -> tuple[list[int], list[float]]:
    return ([], []) if entry is None else (list(entry.ids), list(entry.values))  # type: ignore[attr-defined]


def a_tree(draw: random.Random, text: Sequence[int]) -> tuple[list[int], list[int]]:
    """Random tokens below random parents; half of them go on as the text does."""
    tokens, parents, depths = [], [], [0]
    right = {0}
    for node in range(1, 1 + draw.randrange(9)):
        parent = draw.choice([draw.randrange(node), node - 1, max(right)])
        depth = depths[parent]
        token = draw.randrange(V)
        if draw.random() < 0.7 and depth < len(text):
            token = text[depth]
        if parent in right and depth < len(text) and token == text[depth]:
            right.add(node)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth + 1)
    return tokens, parents


def the_path(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The nodes that the text follows: of equal ones the first."""
    path = [0]
    while len(path) <= len(text):
        after = [
            node
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1)
            if parent == path[-1] and token == text[len(path) - 1]
        ]
        if not after:
            break
        path.append(after[0])
    return path


def test_trees_give_the_tokens_of_single_steps(plain, rng: random.Random, rounds: int) -> None:
    texts, entries = plain
    branched = 0
    for _ in range(12 * rounds):
        rows = sorted(rng.sample(range(4), rng.randint(1, 4)))
        sampler = a_sampler(rows)
        done = dict.fromkeys(rows, 0)
        while rows := [row for row in rows if done[row] < LENGTH - 10]:
            trees = {row: a_tree(rng, texts[row][done[row] :].tolist()) for row in rows}
            plain_rows = {row for row in rows if rng.random() < 0.2}
            for row in plain_rows:  # a chain, which has no parents
                trees[row] = trees[row][0], list(range(len(trees[row][0])))
            last = {row: ([STARTS[row], *texts[row]][done[row]]) for row in rows}
            logits = torch.cat([TABLE[[last[row], *trees[row][0]]] for row in rows])
            parents: Mapping[int, Sequence[int]] = {
                index: trees[row][1] for index, row in enumerate(rows) if row not in plain_rows
            }
            found = sampler.verify(
                np.array(rows),
                np.array([1 + done[row] for row in rows]),
                logits,
                [np.array(trees[row][0], dtype=np.int64) for row in rows],
                parents,
            )
            assert not found.errors
            runs = np.split(found.tokens, found.accepted.cumsum()[:-1])
            sources = np.split(found.sources, found.accepted.cumsum()[:-1])
            first, ended = 0, []
            for index, row in enumerate(rows):
                tokens, tree = trees[row]
                text = texts[row][done[row] :].tolist()
                if row == 3 and STOP in text:
                    text = text[: text.index(STOP) + 1]
                    path = the_path(tokens, tree, text)[: len(text)]
                    ended += [row] * (len(path) == len(text))
                else:
                    path = the_path(tokens, tree, text)
                branched += path != list(range(len(path)))
                assert (sources[index] - first).tolist() == path
                assert runs[index].tolist() == text[: len(path)]
                for at, entry in enumerate(found.logprobs.get(index, ())):
                    ids, numbers = entries[row][done[row] + at]
                    assert values(entry)[0] == ids
                    assert values(entry)[1] == pytest.approx(numbers, abs=1e-6)
                done[row] += len(path)
                first += 1 + len(tokens)
            rows = [row for row in rows if row not in ended]
    assert branched > 30


def test_a_row_that_fails_behind_a_branch_keeps_it() -> None:
    """All logits behind the second choice are NaN; they are of no consequence elsewhere."""
    sampler = a_sampler([0])
    sampler.release(0)
    params = evolve(PARAMS[0], logprobs=None)
    sampler.admit(
        RowStart(0, "r0", params, np.array([3]), np.zeros(0, np.int64), 1), params, None
    )  # fmt: skip
    best = int(TABLE[3].argmax())
    logits = torch.stack([TABLE[3], TABLE[best], torch.full((V,), torch.nan)])
    drafts = [np.array([(best + 1) % V, best])]
    found = sampler.verify(np.zeros(1, np.int64), np.ones(1, np.int64), logits, drafts, {0: [0, 0]})
    assert (found.tokens.tolist(), found.accepted.tolist()) == ([best], [1])
    assert (found.errors, found.sources.tolist()) == ({}, [0])
