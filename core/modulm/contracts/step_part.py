"""Step part: how a feature takes part in engine steps (group `modulm.step_parts`).

A part has two halves: a planner beside the scheduler and a runner in each worker. They exchange
plain values under the part's name: `RowStart.parts` when a row starts, `Plan.parts` with each
step, `StepResult.parts` on the way back. The halves may run in different processes, so the part
defines how its values are packed.

All methods of both halves default to doing nothing. When the engine is built it checks which
methods each half overrides and calls only those, so that unused methods cost nothing per step.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from typing import Self

    import numpy as np
    import torch

    from modulm.contracts.attention import AttentionBackend, AttentionSpec, StepLayout
    from modulm.contracts.decision import Decision
    from modulm.contracts.executor import (
        Capacity,
        GroupCapacity,
        PartReport,
        Plan,
        RowFailure,
        RowLogprobs,
        RowStart,
    )
    from modulm.contracts.grammar import Grammar
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch, CacheSpec, Model
    from modulm.contracts.requests import Request
    from modulm.contracts.sampling import StructuredOutputs

__all__ = [
    "API",
    "DIRECT",
    "BatchFactory",
    "BlockCache",
    "BlockGroup",
    "BuiltModel",
    "PartPlanner",
    "PartRunner",
    "PlannerContext",
    "PrefixNames",
    "RanStep",
    "Rows",
    "RunnerContext",
    "StepDraft",
    "StepLimits",
    "StepPart",
    "TokenChooser",
    "Verified",
    "WaitingRequest",
    "overridden",
]

API = 1

#: `PartRunner.recording` for a step that cannot be recorded and repeated.
DIRECT = "direct"

T = TypeVar("T")


# What planners work with: views of the scheduler's own objects.


class Rows(Protocol):
    """The running sequences, as arrays over stable row indices.

    tokens: [rows, width] int32. computed: number of tokens that will be computed once all planned
    steps have run. length: number of tokens known or planned to be sampled. limit: `length` at
    which the row ends. waiting: paused rows. epoch: how many requests have used the row. names:
    request ids.
    """

    rows: int
    tokens: np.ndarray
    computed: np.ndarray
    length: np.ndarray
    limit: np.ndarray
    waiting: np.ndarray
    epoch: np.ndarray
    names: np.ndarray

    def pause(self, row: int) -> None:
        """Leave the row out of steps until `resume`."""

    def resume(self, row: int) -> None:
        """Include the row in steps again."""


class BlockGroup(Protocol):
    """The blocks of one cache group. tables: [rows, blocks] int32, 0 for no block."""

    tables: np.ndarray

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being reused, even after their rows have been released."""

    def unpin(self, blocks: Sequence[int], *, first: bool = False) -> None:
        """Undo one `pin` of each block. first: those that are now free are reused first."""

    def shorten(self, row: int, tokens: int) -> None:
        """Release the row's blocks behind its first `tokens` tokens, a multiple of their size."""

    def watch(self, watcher: Callable[[bytes, bool], None]) -> None:
        """Call `watcher(name, True)` for each block that enters the prefix cache, and
        `watcher(name, False)` for each that is evicted, on the engine's thread. Emptying the whole
        cache is announced by `PartPlanner.forget` instead.
        """


class BlockCache(Protocol):
    """The block pools.

    sizes: tokens per block, for the groups whose blocks have names. uniform: whether all groups
    store tokens in blocks of one size. unit: prompts are best split at multiples of this.
    """

    sizes: tuple[int, ...]
    uniform: bool
    unit: int
    groups: tuple[Any, ...]

    def grow(self, rows: np.ndarray, ends: np.ndarray) -> bool:
        """Allocate blocks for rows up to `ends` tokens. False, without change: too few are free."""

    def reserve(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Allocate blocks for tokens up to `ends`, as many as are free."""

    def room(self, rows: np.ndarray) -> np.ndarray:
        """The tokens that each row has blocks for: [rows]."""

    def lookup(self, names: Mapping[int, Sequence[bytes]], most: int) -> Any:
        """Find the longest cached prefix of at most `most` tokens. names: block size -> names.

        Returns its `tokens`, and `blocks` with the ids of each group, 0 where none is needed.
        """

    def lend(
        self, rows: np.ndarray, drafted: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray | None, ...]]:
        """Lend slots for the recurrent states after each drafted token.

        Returns how many drafts of each row got a slot in every group, and `Plan.state_slots`.
        """


class PrefixNames(Protocol):
    """Names of full blocks: chained hashes of everything that their contents depend on.

    enabled: a planner whose model's caches depend on more than the tokens sets it to False when it
    is built.
    """

    enabled: bool

    def names(self, row: int) -> list[bytes]:
        """Return the names of a running row's full blocks, for the smallest block size."""

    def advance(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Name the blocks that are full now that the rows' first `ends` tokens are computed."""


class StepLimits(Protocol):
    """Limits of a step.

    rows: sequences that run at once. tokens: token budget. chunked: whether prompts may be split
    over steps. long: maximum tokens of a chunk; 0: no limit.
    """

    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def chunked(self) -> bool: ...
    @property
    def long(self) -> int: ...


class WaitingRequest(Protocol):
    """A request before it has a row.

    tokens: number of tokens to compute on admission. overtaken: later requests that were admitted
    first. chains: names of its full blocks, by block size. row: None while it waits. order: of
    arrival.
    """

    request: Request
    overtaken: int
    chains: Any
    row: int | None
    order: int

    @property
    def tokens(self) -> int: ...


class StepDraft(Protocol):
    """The step being planned.

    number: `Plan.step`. rows, starts, counts: as in `Plan`, without tokens that parts add. A part
    that adds tokens sets `drafted` (and `state_slots`), and `one_each` to False.
    """

    number: int
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    one_each: bool
    drafted: np.ndarray | None
    state_slots: tuple[np.ndarray | None, ...]


@frozen(eq=False, kw_only=True)
class PlannerContext:
    """What a planner is built from. values: the result of `PartRunner.capacity`."""

    rows: Rows
    cache: BlockCache
    prefixes: PrefixNames
    limits: StepLimits
    capacity: Capacity
    values: Mapping[str, Any] = field(factory=dict)


class PartPlanner:
    """The scheduler's half. Called on the engine's thread; must not block.

    one_at_a_time: a row is not planned again before the result of its last step has arrived.
    """

    one_at_a_time: bool = False

    @property
    def busy(self) -> bool:
        """Whether steps must run, even empty ones, for work in progress."""
        return False

    # Requests.

    def check(self, request: Request) -> None:
        """Raise RequestError, naming the field, for a request that can never run."""

    def defers(self, waiting: WaitingRequest, before: Sequence[WaitingRequest]) -> bool:
        """Whether the request must wait for this part. before: requests deferred ahead of it in
        this step.
        """
        return False

    def external(self, waiting: WaitingRequest, cached: int) -> int | None:
        """Return how many leading tokens need not be computed, including the `cached` ones already
        on the device. None: ask again later. At most one part returns more than `cached`.
        """
        return cached

    def load(self, waiting: WaitingRequest, row: int, cached: int, tokens: int) -> None:
        """Fill the row's blocks up to `tokens`; the part pauses it until `loaded` returns it."""

    def loaded(self, rows: Sequence[int]) -> Mapping[int, int]:
        """Return the rows whose load has ended since the last call: row -> tokens that need not be
        computed. Workers learn of a row with the first step that runs it.
        """
        return {}

    def limit(self, request: Request, start: int, count: int) -> int:
        """Return how many of tokens [start, start + count) of a joining request fit the step."""
        return count

    def waits_in_row(self, request: Request) -> bool:
        """Whether a joining request may take a row although none of its tokens fit yet."""
        return False

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        """Called when the request gets a row."""

    def joined(self, request: Request, row: int, start: int, count: int) -> None:
        """Called when the request, just admitted, computes these tokens in this step."""

    def row_value(self, request: Request) -> object | None:
        """Return the value for the runners' `admit`, carried in `RowStart.parts`."""
        return None

    def release(self, request: Request, row: int) -> None:
        """Called when the row is released: its request has ended or returns to the queue."""

    def finished(self, request: str) -> None:
        """Called when the request has ended."""

    # Steps.

    def begin(self, decoding: bool) -> None:
        """Called when a step is planned or replanned. decoding: whether it has decode rows."""

    def claim(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Reduce `counts` in place before the token budget is divided."""

    def cut(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Reduce `counts` in place after the token budget was divided."""

    def sampled(self, rows: np.ndarray) -> None:
        """Called with the rows whose prompt is complete after this step."""

    def plan(self, step: StepDraft, left: int) -> object | None:
        """Return the value for the runners, carried in `Plan.parts`. left: unused token budget."""
        return None

    def receive(self, plan: Plan, report: PartReport) -> None:
        """Handle one rank's report on this step, or on what happened since the last one."""

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """Called when the step is committed.

        rows: its rows that still run. ends: their computed tokens. owners: the row of each of the
        step's new tokens.
        """

    def ends(self, row: int) -> bool:
        """Whether a row that produced no token in this step is complete and ends."""
        return False

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        """Return fields of `StepEvents` for the committed step. names: row -> request id."""
        return {}

    def fail(self, plan: Plan) -> None:
        """Called when the step raised; it may have run in part."""

    def forget(self, idle: bool) -> None:
        """Called when the caches are emptied. idle: no row is running."""


# What runners work with.


@frozen(eq=False)
class Verified:
    """The outcome of a step with drafted tokens. Rows are given by their index in the step.

    tokens: new tokens of all rows, concatenated. accepted: [rows] int32, number of tokens per row;
    0 for rows that failed or got no token. logprobs, errors: by row. unfinished: rows that got no
    token and continue. sources: [tokens] int64, the index of the logits that each token was chosen
    from, if the sampler chose them.
    """

    tokens: np.ndarray
    accepted: np.ndarray
    logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(factory=dict)
    errors: Mapping[int, RowFailure] = field(factory=dict)
    unfinished: Collection[int] = ()
    sources: np.ndarray | None = None


class TokenChooser(Protocol):
    """The sampler, as seen by parts that verify drafted tokens."""

    def verify(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
        parents: Mapping[int, Sequence[int]] = ...,
    ) -> Verified:
        """Keep drafts up to the first mismatch, plus the model's own token.

        positions: [rows], position of each row's first new token. drafts: [d] int64 per row.
        logits: [sum(d + 1), vocabulary], for each row's last known token and its drafts. parents:
        index of a row whose drafts are a tree -> the parent of each: 0 for the last known token,
        i + 1 for draft i, which precedes it. Then the chosen tokens say which branch is kept.
        """

    def legal(self, row: int, drafts: np.ndarray) -> np.ndarray:
        """Return the drafts before the first one that the row's grammar forbids."""

    def forced(self, row: int) -> np.ndarray:
        """Return drafts of the text that the row's grammar determines: [n] int64."""


class BatchFactory(Protocol):
    """Builds a step's tensors from its plan.

    caches: one per layer. owners: the cache group of each. groups: builders of attention plans.
    """

    caches: tuple[Any, ...]
    owners: tuple[int, ...]
    groups: tuple[Any, ...]

    def build(self, plan: Plan, sample: np.ndarray) -> Batch:
        """Build the tensors of `plan`; they are valid until the next call.

        sample: [n] int64, indices of the step's tokens that need logits.
        """

    def copy_tokens(
        self, plan: Plan, places: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> None:
        """Copy cache entries of tokens to other positions of the same row.

        places: [n] int64, row indices in the plan. sources, targets: [n] int64, positions. All
        sources are read before any target is written. Raises UnsupportedError if a cache cannot
        copy single tokens.
        """


@frozen(eq=False, kw_only=True)
class BuiltModel:
    """A model that a worker has loaded.

    config: resolved. loaded: the model, its ops, pooler, adapters and cache groups. mesh: the
    ranks that share the model.
    """

    config: Any
    loaded: Any
    platform: Any
    plugins: Any
    mesh: Any


@frozen(eq=False, kw_only=True)
class RunnerContext:
    """What a runner gets once the caches are allocated.

    builder: builds batches with only the runner's own caches; None if it has none. model_builder:
    builds the model's batches. focus: calls `PartRunner.focus` of all runners; pass None before
    running tokens that belong to no row. logits: computes logits from hidden states [n, hidden] of
    rows [n]. rank: of the `ranks` that share the model. groups: the cache groups of all ranks.
    caches: tensors by index in `groups`.
    """

    model: Model
    platform: Any
    builder: BatchFactory | None
    model_builder: BatchFactory
    focus: Callable[[np.ndarray | None, np.ndarray | None], None]
    logits: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
    sampler: TokenChooser
    rows: int
    rank: int = 0
    ranks: int = 1
    caches: Mapping[int, Sequence[torch.Tensor]] = field(factory=dict)
    groups: tuple[GroupCapacity, ...] = ()


@frozen(eq=False, kw_only=True)
class RanStep:
    """A step after sampling.

    tokens: row -> its new tokens. lasts: [rows of the plan] int64, index in the batch of each
    row's last token that is not a rejected draft. hidden: [tokens, hidden]. layers: hidden states
    of the layers in `PartRunner.layers`. batch: returns the batch that the model ran on.
    """

    plan: Plan
    tokens: Mapping[int, np.ndarray]
    lasts: np.ndarray
    hidden: torch.Tensor
    layers: tuple[torch.Tensor, ...]
    batch: Callable[[], Batch]


class PartRunner:
    """The worker's half.

    At most one of `begin`, `collect`, `after` and `report` returns a value per step: the part's
    report.

    caches: its own KV caches, in the same blocks as those of the model's layers. backends:
    attention backends of those caches, unless they use a layer's. layers: indices of layers whose
    hidden states `RanStep.layers` holds. drafts: maximum drafted tokens per row and step. ahead:
    tokens after a step's last one that rows should have blocks for. every: call `after` also for
    steps without new tokens. tokenless: rows that never produce tokens. sampled_only: `after` reads
    no hidden states of tokens that are not sampled, so that the model may leave them out.
    """

    caches: Sequence[CacheSpec] = ()
    backends: Mapping[AttentionSpec, AttentionBackend] = {}
    layers: tuple[int, ...] = ()
    drafts: int = 0
    ahead: int = 0
    every: bool = False
    tokenless: Collection[int] = ()
    sampled_only: bool = False

    def capacity(self) -> Mapping[str, Any]:
        """Return plain values for the planner (`PlannerContext.values`)."""
        return {}

    def open(self, context: RunnerContext) -> None:
        """Called once, after the caches are allocated and before the first step."""

    def close(self) -> None:
        """Release resources; no other call follows."""

    # Before the model runs.

    def prepare(self, plan: Plan, value: Any) -> None:
        """Called before rows are admitted. value: from `PartPlanner.plan`, or None."""

    def admit(self, start: RowStart, value: Any) -> None:
        """Start a row. value: from `PartPlanner.row_value`. A ModulmError fails only this row."""

    def grammar(self, start: RowStart) -> Grammar | None:
        """The grammar that constrains a new row's tokens, or None.

        Called after `admit`, on ranks that return results. An exception fails only this row.
        """
        return None

    def release(self, row: int) -> None:
        """Forget the row; unknown rows are ignored."""

    def begin(self, plan: Plan, value: Any) -> object | None:
        """Called after rows were admitted, before the model runs. May return a report."""
        return None

    def recording(self, plan: Plan) -> str | None:
        """Which recorded step this one may replay: None for the default, a name for a separate one,
        DIRECT for none.

        A `RecordedForward` tells steps apart by the inputs of their batches instead.
        """
        return None

    def vary(self, batch: Batch) -> Batch | None:
        """Return the batch with this part's inputs, to be recorded by a `RecordedForward` as well.

        The batch is of rows in null blocks. `focus(None, None)` follows.
        """
        return None

    def watch(self, forward: Forward, plan: Plan) -> Forward:
        """Return the forward pass, or a wrapper that observes its inputs and outputs."""
        return forward

    def focus(self, rows: np.ndarray | None, positions: np.ndarray | None) -> None:
        """Announce the tokens that are computed next: [n] rows (-1: padding) and their positions.

        Called before each pass of the model and before logits are computed.
        """

    def amend_layout(self, plan: Plan, spec: AttentionSpec, layout: StepLayout) -> StepLayout:
        """Return the attention layout of the plan's tokens for layers of `spec`."""
        return layout

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        """Return the batch with this part's inputs added, such as embeddings."""
        return batch

    # After it ran: in the last pipeline stage.

    def collect(self, plan: Plan, hidden: torch.Tensor) -> object | None:
        """Read the step's hidden states: [tokens, hidden]. May return a report."""
        return None

    def width(self, hidden: torch.Tensor) -> int | None:
        """Return the length of requests' vectors for these hidden states; None if not this part."""
        return None

    def verify(
        self,
        plan: Plan,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
    ) -> Verified | None:
        """Verify a step's drafted tokens, or return None to leave it to the sampler.

        The arguments are those of `TokenChooser.verify`.
        """
        return None

    def after(self, step: RanStep) -> object | None:
        """Called once the step's tokens are sampled. May return a report."""
        return None

    def follow(self, plan: Plan, hidden: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        """Called on ranks that share the model but sample nothing, where `after` is called on the
        first: both may run the same collectives. The arguments are those of `RanStep`.
        """

    def report(self) -> object | None:
        """Return a report on what happened since the last step, or None."""
        return None


class StepPart(ABC):
    """Builds both halves, each in its process, and packs the values they exchange.

    all_ranks: whether reports of all ranks reach the planner, or only those of the rank that
    returns results. masks: whether the runner sets `StepLayout.masks`, which not all attention
    backends support.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    all_ranks: ClassVar[bool] = False
    masks: bool = False

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        """Return the part for this configuration, or None if the feature is off.

        config: resolved. plugins: the plugin manager, to resolve drivers.
        """
        return cls()

    def decision(self) -> Decision | None:
        """Return what `modulm explain` shows of this part, or None."""
        return None

    def planner(self, context: PlannerContext) -> PartPlanner | None:
        """Build the scheduler's half, or return None if there is nothing to plan."""
        return None

    def runner(self, built: BuiltModel) -> PartRunner | None:
        """Build the worker's half for a loaded model, or return None if there is nothing to run.

        Called again when the worker wakes up, with the same model unless it was reloaded.
        """
        return None

    def unload(self) -> None:
        """Drop everything that belongs to the model. The runners have been closed."""

    def close(self) -> None:
        """Release resources when the worker, or the engine that built the planner, stops; may be
        called twice.
        """

    # Requests that the worker knows before they have a row, until they have ended.

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None] | None:
        """Compile the constraint in the background (see `Executor.prepare`).

        Returns None if another part handles it. Raises QueueFull; other errors are set on the
        future.
        """
        return None

    def forget(self, request: str) -> None:
        """Drop a prepared request that has ended or was cancelled; unknown ones are ignored."""

    # Values are packed for msgpack; by default they are expected to be plain already.

    def pack_plan(self, value: Any) -> Any:
        """Pack a value of `Plan.parts`."""
        return value

    def unpack_plan(self, packed: Any) -> Any:
        """Undo `pack_plan`."""
        return packed

    def pack_row(self, value: Any) -> Any:
        """Pack a value of `RowStart.parts`."""
        return value

    def unpack_row(self, packed: Any) -> Any:
        """Undo `pack_row`."""
        return packed

    def pack_report(self, value: Any) -> Any:
        """Pack a value of `PartReport`."""
        return value

    def unpack_report(self, packed: Any) -> Any:
        """Undo `pack_report`."""
        return packed


def overridden(halves: Sequence[T], method: str) -> tuple[Any, ...]:
    """Return the bound methods of the halves that override `method` of their base class."""
    bases = {"PartPlanner": PartPlanner, "PartRunner": PartRunner}
    methods = []
    for half in halves:
        base = next(cls for cls in type(half).__mro__ if cls.__name__ in bases)
        if getattr(type(half), method) is not getattr(bases[base.__name__], method):
            methods.append(getattr(half, method))
    return tuple(methods)
