"""Executor: where the steps run (group `modulm.executors`), and the values that cross to it.

A plan holds all that a step needs, so that an executor may run it in this process, in another
one or on another machine. Plans and results are numpy and plain values: they serialise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.connector import TransferPlan, TransferResult
    from modulm.contracts.decision import Decision
    from modulm.contracts.media import MediaItem
    from modulm.contracts.sampling import PoolingParams, SamplingParams, StructuredOutputs
    from modulm.errors import EngineDead

__all__ = [
    "API",
    "PENDING",
    "Capacity",
    "Executor",
    "ModelDescription",
    "Plan",
    "RowLogprobs",
    "RowStart",
    "StepResult",
]

API = 2

#: In a plan's tokens: the token that the row sampled in the step before (asynchronous scheduling).
PENDING = -1


@frozen(eq=False)
class RowStart:
    """Sampling state that a row brings when it first runs; the runner keeps it until release.

    prompt: [tokens] int64; output: tokens that the row had produced before it was preempted.
    seed: of the row's random stream, always set for rows that are not greedy: the front end draws
    one where the request gives none, and gives each of n choices its own. A constraint on the text
    (`params.structured_outputs`) is compiled by the worker (`Executor.prepare`), which makes the
    matcher and replays `output`. stop_ids: tokens that min_tokens holds back (end of sequence
    unless ignored, stop_token_ids). bad_words: token sequences of `params.bad_words`.
    adapter: name of the row's adapter, which `Plan.adapters` gave a slot, or None; adapter_from:
    the first of the row's tokens that it applies to. media: the items of the prompt, whose tokens
    are replaced by what an encoder makes of them. positions: [axes, tokens] int64 of the prompt
    where a model counts positions along several axes; later
    tokens go on from `position_offset` + their place, the same on each axis. salt: rows of
    different salt are told nothing of one another (`Request.salt`).
    """

    row: int
    request: str
    params: SamplingParams | PoolingParams
    prompt: np.ndarray
    output: np.ndarray
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None
    media: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    position_offset: int = 0
    salt: str | None = None
    adapter_from: int = 0

    @property
    def words(self) -> np.ndarray:
        """The prompt's tokens but for those that stand for embeddings of the caller's."""
        kept = np.ones(len(self.prompt), dtype=bool)
        for item in self.media:
            kept[item.start : item.start + item.length] = item.encoded
        return self.prompt[kept]


@frozen(eq=False)
class Plan:
    """What one engine step will run. Immutable.

    rows: [rows] int32, stable row indices. starts: [rows] int32, tokens computed before the step.
    counts: [rows] int32, tokens to compute now. tokens: [sum(counts)] int64, with PENDING for
    those that are not known yet. tables: per cache group [rows, blocks] int32. samples: [rows]
    bool, the row yields a token at its last position.
    Releases take effect before admissions, so that a plan may give a freed row to another request.

    drafted: [rows] int32, how many of a row's tokens, its last ones, were drafted and are verified
    in this step, or None where no row has any. Such a row computes its last known token and d
    drafts, and gives 1 to d + 1 tokens: the drafts up to the first that the model would not have
    chosen, and the model's own choice after them. Its next step starts after what it gave; what
    the caches hold of rejected drafts is overwritten then. state_slots: per cache group [rows,
    most drafts] int32, the slots of a group of states where the states go that a drafted row's
    tokens leave, one each, but for the last one's, which goes where the table says (0: none); None
    for other groups, and () where no row has drafts. The states have the bits of single steps.

    encode: (row, index of the item) of the media whose encoder runs in this step, before the
    model. encode_rows: 0, or it is enough that this many rows go through a layer of an encoder in
    this step: what is left of the items, and of those begun before, is for the steps that follow.
    drop_media: hashes whose encoder output, or what is done of it, nobody needs any more.
    adapters: (slot, name) of adapters that take a slot in this step, before anything runs; slots
    count from 1. transfers: what a KV connector moves beside the step.
    """

    step: int
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    tables: tuple[np.ndarray, ...]
    samples: np.ndarray
    admit: tuple[RowStart, ...] = ()
    release: tuple[int, ...] = ()
    drafted: np.ndarray | None = None
    state_slots: tuple[np.ndarray | None, ...] = ()
    encode: tuple[tuple[int, int], ...] = ()
    drop_media: tuple[bytes, ...] = ()
    adapters: tuple[tuple[int, str], ...] = ()
    transfers: TransferPlan | None = None
    encode_rows: int = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run. A plan without rows may have transfers to begin, or be
        made to hear of those that have ended.
        """
        return not len(self.rows) and self.transfers is None


@frozen(eq=False)
class RowLogprobs:
    """Log probabilities of one position: token ids and values, best first after the chosen one."""

    ids: np.ndarray
    values: np.ndarray
    rank: int


@frozen(eq=False)
class StepResult:
    """What a step gave.

    tokens: [sum(accepted)] int64, what the sampling rows gave, in the plan's order. accepted:
    [sampling rows] int32, how many tokens each of them gave, 0 if it failed or is pooled; None: one
    each. logprobs: row -> one entry for each of its tokens. prompt_logprobs: row -> one entry for
    each of the prompt's tokens `start + 1 ... start + count` (the first token has none). pooled:
    row -> array, in the step in which the row samples. errors: row -> a sentence; the other rows
    are unhurt; a row that failed reports it again in every later plan until it is released.
    drafts: row -> [n] int64, tokens that the drafter proposes to verify in the row's next step.
    transfers: what a KV connector has moved since the last step. seconds: time the step took in
    the executor. refused: row -> the field to blame, of those of `errors` that asked for what
    cannot be ("" if it is several fields together); the others are not the request's fault.
    encoded: hashes of media that were encoded in pieces, the last of which was in this step.
    routed: [experts] int64, how many times tokens chose each expert, where that is counted.
    """

    step: int
    tokens: np.ndarray
    accepted: np.ndarray | None = None
    logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(factory=dict)
    prompt_logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(factory=dict)
    pooled: Mapping[int, np.ndarray] = field(factory=dict)
    errors: Mapping[int, str] = field(factory=dict)
    drafts: Mapping[int, np.ndarray] = field(factory=dict)
    transfers: TransferResult | None = None
    seconds: float = 0.0
    refused: Mapping[int, str] = field(factory=dict)
    encoded: tuple[bytes, ...] = ()
    routed: np.ndarray | None = None


@frozen
class Capacity:
    """What an executor can hold once the model is loaded.

    groups: one entry per cache group: (kind, block size in tokens, window or None, blocks).
    vocabulary: the width of the logits, which may differ from the tokenizer's length. drafts: most
    tokens that are drafted ahead for a row; 0 without a drafter. ahead: tokens beyond those of a
    step for which rows should have blocks, since the drafter keeps something of them. adapters:
    how many may be in one step; 0: none at all. encoder_tokens: embeddings that encoders may give
    in one step, and encoder_cache: those that are kept at once; 0 where the model takes no media.
    """

    groups: tuple[tuple[str, int, int | None, int], ...]
    vocabulary: int
    max_model_len: int
    notes: tuple[str, ...] = ()
    drafts: int = 0
    ahead: int = 0
    adapters: int = 0
    encoder_tokens: int = 0
    encoder_cache: int = 0


@frozen(kw_only=True)
class ModelDescription:
    """What an executor says of the model that it has loaded. Plain values.

    tasks: what requests may ask for; width: of embeddings; pooling: how, by the names of
    `--pooler-config`; weight_bytes: what the weights take; decisions: why it runs the way it does;
    media_family: `Model.media_family`.
    """

    dtype: str = ""
    tasks: tuple[str, ...] = ("generate",)
    width: int = 0
    pooling: Mapping[str, object] = field(factory=dict)
    platform: str = ""
    device: str = ""
    weight_bytes: int = 0
    decisions: tuple[Decision, ...] = ()
    media_family: str = ""


class Executor(ABC):
    """Carries plans to a worker, or to several, and their results back.

    Only `prepare`, `forget` and what is about adapters may be called while steps run, from any
    thread. What an executor cannot do raises UnsupportedError.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Whether only an engine without a server can be run: others run the same beside this one.
    offline_only: ClassVar[bool] = False

    @abstractmethod
    def start(self, config: EngineConfig) -> Capacity:
        """Load the model and allocate its caches."""

    @abstractmethod
    def run(self, plan: Plan) -> StepResult:
        """Run one step. Raising means the whole step failed."""

    def submit(self, plan: Plan) -> Future[StepResult]:
        """Start one step; plans are run in the order submitted. The default runs it at once."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.run(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def watch(self, died: Callable[[EngineDead], None]) -> None:
        """Have `died` called, on any thread, when the executor stops working, between steps too."""

    def describe(self) -> ModelDescription:
        """The model that was loaded."""
        return ModelDescription()

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        """Get ready for the rows of a request whose text is constrained: compile its grammar.

        Done before the request is scheduled, beside the steps. A constraint that is wrong, or too
        complex, is a RequestError. Raises QueueFull when too many are being compiled.
        """
        raise self._lacks("structured outputs")

    def forget(self, request: str) -> None:
        """A request that was prepared has ended, or will not come."""

    def check(self) -> None:
        """Called after a failed step: raise if the executor does not work any more."""
        raise self._lacks("check")

    def sleep(self, level: int) -> None:
        """Give back the caches (level 1), and the weights as well (level 2)."""
        raise self._lacks("sleep")

    def wake_up(self) -> None:
        """Have again what `sleep` gave back; the caches are empty, and as large as before."""
        raise self._lacks("wake up")

    def add_adapter(self, name: str, path: Path) -> None:
        """Read an adapter's files, for requests that name it, or again: rows that use it go on with
        what the files now say.

        Raises CheckpointError naming the file and what does not fit.
        """
        raise self._lacks("add adapters")

    def prepare_adapter(self, name: str) -> None:
        """See that an adapter which was added lies in host memory: the step that first uses it then
        reads no file. Raises as `add_adapter` does, or EngineError if there is no such adapter.
        """
        raise self._lacks("prepare adapters")

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; rows that use it finish with it.

        Raises EngineError if there is none of this name.
        """
        raise self._lacks("remove adapters")

    def profile(self, folder: str | None) -> None:
        """Record what the steps spend their time on; write it into `folder` when told None."""
        raise self._lacks("profile")

    @abstractmethod
    def stop(self) -> None:
        """Release everything; may be called twice."""

    def _lacks(self, operation: str) -> UnsupportedError:
        return UnsupportedError(f"executor {self.name} does not support this: {operation}")
