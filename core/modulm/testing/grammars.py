"""Test support for grammar backends: follow a text, or walk at random, under the masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from modulm.contracts.grammar import Grammar, Matcher
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["allowed", "takes", "wander"]


def allowed(matcher: Matcher, vocabulary: int) -> list[int]:
    """Return the tokens that the matcher's mask allows next."""
    mask = np.zeros(-(-vocabulary // 32), dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little")
    tokens: list[int] = np.flatnonzero(bits).tolist()
    return tokens


def takes(tokenizer: Tokenizer, grammar: Grammar, text: str, vocabulary: int) -> bool:
    """Whether a model may generate `text` and stop. Mask and matcher must agree."""
    matcher = grammar.matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.stop_ids[0]]:
        fits = token in allowed(matcher, vocabulary)
        if matcher.accept(token) != fits:
            raise AssertionError(f"mask and matcher disagree about token {token} in {text!r}")
        if not fits:
            return False
    return True


def wander(
    tokenizer: Tokenizer, grammar: Grammar, seed: int, vocabulary: int, most: int = 400
) -> str | None:
    """Return the text of a random walk through the masks; None if it does not end by itself."""
    matcher, random = grammar.matcher(), np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < most:
        choices = allowed(matcher, vocabulary)
        ends = [token for token in choices if token in tokenizer.stop_ids]
        token = int(random.choice(ends or choices))
        if not matcher.accept(token):
            raise AssertionError(f"the mask allows token {token}, which the matcher rejects")
        if ends:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
    return None
