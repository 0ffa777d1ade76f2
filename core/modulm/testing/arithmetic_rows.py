"""What the arithmetic model computes for a row, and what a test scripts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import field, frozen

from modulm.errors import EngineError
from modulm.testing.arithmetic import digest_of, token_of

__all__ = ["FakeDrafter", "FakeFault", "Group", "Script", "reference_tokens"]

#: (a row's tokens, the tokens that will follow) -> those it proposes.
FakeDrafter = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


class FakeFault(EngineError):
    """The engine gave the executor an inconsistent plan; the message says which row and where."""


@frozen
class Group:
    """One cache group of the fake model: window in tokens (None: full attention). state: the
    group keeps a state, whose slots are its blocks.
    """

    block_size: int = 16
    blocks: int = 64
    window: int | None = None
    state: bool = False

    def first_visible(self, position: int) -> int:
        """The first position that the query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@frozen
class Script:
    """What one request's row does; `k` counts its sampled tokens from 0.

    tokens: exact tokens; after the last one the hash goes on. delay: seconds per sampled token.
    errors: k -> sentence, the row fails there. nan: as errors, worded as the runner words NaN
    logits. crash: k at which the whole step raises. hang: k at which the step waits until
    `FakeExecutor.resume` is set.
    """

    tokens: Sequence[int] = ()
    delay: float = 0.0
    errors: Mapping[int, str] = field(factory=dict)
    nan: frozenset[int] = field(default=frozenset(), converter=frozenset)
    crash: int | None = None
    hang: int | None = None


def reference_tokens(
    prompt: Sequence[int],
    n: int,
    *,
    vocabulary: int = 512,
    reserved: int = 8,
    windows: Sequence[int | None] = (None,),
    seed: int | None = None,
    script: Sequence[int] = (),
) -> list[int]:
    """The n tokens that FakeExecutor must give after `prompt`, without any engine.

    windows: of the groups, in order; reserved: ids below it never come out by hash (make them
    the stop ids); seed: only for rows that are not greedy.
    """
    history = list(prompt)
    groups = [Group(window=window) for window in windows]
    for k in range(n):
        if k < len(script):
            history.append(script[k])
            continue
        firsts = [group.first_visible(len(history) - 1) for group in groups]
        parts = [(first, np.array(history[first:], dtype=np.int64)) for first in firsts]
        history.append(token_of(digest_of(parts, seed), vocabulary, reserved))
    return history[len(prompt) :]
