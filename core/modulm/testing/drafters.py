"""Fake drafters, whose proposals must never change the output, and an executor that uses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import ClassVar

import numpy as np
from attrs import frozen

from modulm.contracts.config import EngineConfig
from modulm.contracts.drafter import Drafter, DraftStep, Needs
from modulm.contracts.executor import Capacity, Executor, ModelDescription, Plan, StepResult
from modulm.contracts.model import CacheSpec
from modulm.contracts.sampling import StructuredOutputs
from modulm.engine.parts import open_parts
from modulm.engine.worker.worker import Worker
from modulm.plugins import manager

__all__ = [
    "DraftingExecutor",
    "FakeDrafter",
    "Propose",
    "adversarial",
    "drafting_executor",
    "mixed",
    "right",
    "wrong",
]

#: (a row's tokens so far, the tokens that will follow) -> drafts
Propose = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


def right(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Always right."""
    return coming


def wrong(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Always wrong."""
    return [(token + 1) % 50 for token in coming]


def mixed(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Correct up to a point that depends on the history, and of any length."""
    good = sum(history) % (len(coming) + 1)
    return [*coming[:good], *wrong(history, coming[good:])][: len(history) % 7]


def adversarial(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Too many drafts, with tokens that do not exist."""
    return [[*coming, *range(60)], [*coming[:1], -1, 3], [*coming[:2], 10**12], [0] * 9][
        len(history) % 4
    ]


@frozen
class _Nothing:
    """No options."""


class FakeDrafter(Drafter):
    """Proposes the result of a function.

    references: complete sequences, prompts included, in which a row's history is looked up.
    fails_at: the call that raises. `steps` records the steps that it received, and `ran` the
    second-last token of each history with the token that the batch has at the row's index.
    """

    name: ClassVar[str] = "fake"
    api: ClassVar[int | tuple[int, int]] = 1
    Config: ClassVar[type] = _Nothing
    needs: ClassVar[Needs] = Needs(histories=True, hidden=True)

    def __init__(
        self,
        propose: Propose,
        references: Sequence[Sequence[int]],
        most: int = 4,
        *,
        caches: tuple[CacheSpec, ...] = (),
        fails_at: int | None = None,
    ) -> None:
        super().__init__(_Nothing())
        self.most = most
        self.function = propose
        self.references = [tuple(reference) for reference in references]
        self.steps: list[DraftStep] = []
        self.ran: list[tuple[int, int]] = []
        self.released: list[int] = []
        self._caches = caches
        self._fails_at = fails_at

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self._caches

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self.steps.append(step)
        tokens = step.batch.tokens.numpy()[step.accepted].tolist()
        before = [int(history[-2]) for history in step.histories]
        self.ran += zip(before, tokens, strict=True)
        if len(self.steps) == self._fails_at:
            raise RuntimeError("the drafter broke on purpose")
        return [self._of(history.tolist()) for history in step.histories]

    def _of(self, history: list[int]) -> np.ndarray:
        known = next((r for r in self.references if list(r[: len(history)]) == history), ())
        coming = known[len(history) : len(history) + self.most]
        return np.array(self.function(history, coming), dtype=np.int64)

    def release(self, row: int) -> None:
        self.released.append(row)


class DraftingExecutor(Executor):
    """A worker in this process with a drafter that the test created; see `drafting_executor`."""

    name: ClassVar[str] = "drafting"
    api: ClassVar[int | tuple[int, int]] = 3
    drafter: ClassVar[Drafter | None] = None

    def start(self, config: EngineConfig) -> Capacity:
        plugins = manager.current()
        drafts = plugins.load("step_parts", "drafts")(self.drafter)
        others = (part for part in open_parts(config, plugins) if part.name != drafts.name)
        self.worker = Worker(config, plugins, (*others, drafts))
        return self.worker.capacity

    def run(self, plan: Plan) -> StepResult:
        return self.worker.run(plan)

    def submit(self, plan: Plan) -> Future[StepResult]:
        return self.worker.submit(plan)

    def describe(self) -> ModelDescription:
        return self.worker.description

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        return self.worker.prepare(request, constraint)

    def forget(self, request: str) -> None:
        self.worker.forget(request)

    def stop(self) -> None:
        self.worker.close()


def drafting_executor(drafter: Drafter) -> type[DraftingExecutor]:
    """Return an executor class, for registration, whose worker uses the drafter."""
    return type("Drafting", (DraftingExecutor,), {"drafter": drafter})
