"""Step part: how a feature takes part in engine steps (group `modulm.step_parts`).

A part has two halves: a planner beside the scheduler and a runner in each worker. What they tell
each other are plain values, by the part's name: `RowStart.parts` when a row starts, `Plan.parts`
with each step, `StepResult.parts` on the way back. The halves may be in different processes; the
part says how its values are packed for that.

All methods of both halves have a default that does nothing. The engine looks once, when it is
built, which of them a half overrides, and calls only those: what is off costs nothing per step.
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
    from modulm.contracts.executor import (
        Capacity,
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

    tokens: [rows, width] int32. computed: tokens that are computed once all planned steps have
    run. known: tokens known or planned to be sampled. limit: known tokens at which the row ends.
    waiting: rows that are not planned. epoch: counts a row's tenants. names: request ids.
    """

    rows: int
    tokens: np.ndarray
    computed: np.ndarray
    known: np.ndarray
    limit: np.ndarray
    waiting: np.ndarray
    epoch: np.ndarray
    names: np.ndarray

    def pause(self, row: int) -> None:
        """Do not plan the row until it is resumed."""

    def resume(self, row: int) -> None:
        """Plan the row again."""


class BlockGroup(Protocol):
    """The blocks of one cache group. tables: [rows, blocks] int32, 0 where a row holds none."""

    tables: np.ndarray

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks as they are, whatever becomes of the rows that hold them."""

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up blocks that were held."""


class BlockCache(Protocol):
    """The block pools. sizes: tokens per block, of the groups whose blocks have names; uniform:
    whether all groups keep blocks of tokens, of one size; unit: tokens at whose multiples a
    prompt is best cut.
    """

    sizes: tuple[int, ...]
    uniform: bool
    unit: int
    groups: tuple[Any, ...]

    def grow(self, rows: np.ndarray, ends: np.ndarray) -> bool:
        """Blocks for rows that become `ends` tokens long; False, and no change, if too few."""

    def reserve(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Blocks for tokens up to `ends`, as far as there are enough."""

    def room(self, rows: np.ndarray) -> np.ndarray:
        """[rows] tokens that each has blocks for."""

    def lend(
        self, rows: np.ndarray, drafted: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray | None, ...]]:
        """Slots for the states that drafted tokens leave: how many drafts have one in every
        group, and the slots as in `Plan.state_slots`.
        """


class PrefixNames(Protocol):
    """The names of full blocks: chained hashes of all that they depend on."""

    enabled: bool

    def names(self, row: int) -> list[bytes]:
        """The names of a running row's full blocks, of the smallest block size."""

    def advance(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """The rows' first `ends` tokens are computed: name the blocks that became full."""


class StepLimits(Protocol):
    """rows: sequences that run at once; tokens: per step; chunked: whether prompts may be split
    over steps; long: most tokens of a chunk, 0 without such a bound.
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
    """A request before it has a row. tokens: to compute when it is admitted; overtaken: later
    requests that were admitted before it; chains: the names of its full blocks by block size.
    """

    request: Request
    overtaken: int
    chains: Any

    @property
    def tokens(self) -> int: ...


class StepDraft(Protocol):
    """The step that is being planned. number: `Plan.step`. rows, starts, counts: as in `Plan`,
    without tokens that a part adds. A part that adds tokens sets `drafted` (and `state_slots`), and
    `one_each` to False.
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
    """What a planner is made with. values: what the part's runners said of their capacity."""

    rows: Rows
    cache: BlockCache
    prefixes: PrefixNames
    limits: StepLimits
    capacity: Capacity
    values: Mapping[str, Any] = field(factory=dict)


class PartPlanner:
    """The scheduler's half. It runs on the engine's thread and answers at once.

    one_at_a_time: a row is not planned again before the result of its last step is in.
    """

    one_at_a_time: bool = False

    @property
    def busy(self) -> bool:
        """Whether something is under way that steps have to be run for, even empty ones."""
        return False

    # Requests.

    def check(self, request: Request) -> None:
        """Raise RequestError, with the field, for a request that could never run."""

    def defers(self, waiting: WaitingRequest, before: Sequence[WaitingRequest]) -> bool:
        """Whether the request has to wait for something of this part. before: requests in front of
        it that wait in this step.
        """
        return False

    def external(self, waiting: WaitingRequest, cached: int) -> int | None:
        """Tokens of the request that need not be computed, the `cached` ones of the device
        included; None: ask again later. At most one part says more than `cached`.
        """
        return cached

    def load(self, waiting: WaitingRequest, row: int, cached: int, tokens: int) -> None:
        """Fill the row's blocks up to `tokens`; the part pauses the row until `loaded` has it."""

    def loaded(self, rows: Sequence[int]) -> Mapping[int, int]:
        """Of these rows those whose load has ended since the last call: row -> tokens that need no
        work. They are announced to workers with the step that runs them.
        """
        return {}

    def limit(self, request: Request, start: int, count: int) -> int:
        """How many of the tokens [start, start + count) of a joining request fit into the step."""
        return count

    def waits_in_row(self, request: Request) -> bool:
        """Whether a joining request of which nothing fits may wait in a row of its own."""
        return False

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        """The request got a row."""

    def joined(self, request: Request, row: int, start: int, count: int) -> None:
        """The request, which was just admitted, computes these tokens in this step."""

    def row_value(self, request: Request) -> object | None:
        """What the row brings to runners, as `RowStart.parts` has it."""
        return None

    def release(self, request: Request, row: int) -> None:
        """The row is gone; the request has ended or waits again."""

    def finished(self, request: str) -> None:
        """The request has ended."""

    # Steps.

    def begin(self, decoding: bool) -> None:
        """A step is planned, or planned anew. decoding: whether rows that decode are in it."""

    def claim(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Lower, in place, what rows want to compute, before the budget is divided."""

    def cut(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Lower, in place, what rows compute in this step."""

    def sampled(self, rows: np.ndarray) -> None:
        """These rows have computed their prompt with this step."""

    def plan(self, step: StepDraft, left: int) -> object | None:
        """What workers are told with this step. left: tokens left of the budget."""
        return None

    def receive(self, plan: Plan, report: PartReport) -> None:
        """What a rank's runner reported with the step, or since the one before."""

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """The step is committed. rows, ends: its rows that are still there and the tokens that are
        computed of them; owners: whose its new tokens are.
        """

    def ends(self, row: int) -> bool:
        """Whether a row that gave no token in this step has what it asked for, and ends."""
        return False

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        """Fields of `StepEvents` to fill, of the step that was committed. names: row -> request."""
        return {}

    def fail(self, plan: Plan) -> None:
        """The step raised: what it was to do may not have been done."""

    def forget(self, idle: bool) -> None:
        """Caches are emptied; idle: no row is running."""


# What runners work with.


@frozen(eq=False)
class Verified:
    """What rows gave in a step with drafted tokens.

    tokens: of all rows, one run after the other; accepted: [rows] int32, the lengths of the runs, 0
    for rows that failed or go on without a token (`unfinished`, places of rows); logprobs and
    errors: by place of the row.
    """

    tokens: np.ndarray
    accepted: np.ndarray
    logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(factory=dict)
    errors: Mapping[int, RowFailure] = field(factory=dict)
    unfinished: Collection[int] = ()


class TokenChooser(Protocol):
    """The sampler, as parts that verify tokens use it."""

    def verify(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
    ) -> Verified:
        """Keep drafts up to the first mismatch, plus the model's own token.

        positions: [rows], of each row's first new token; drafts: [d] int64 per row; logits:
        [sum(d + 1), vocabulary], of the row's last known token and of its drafts.
        """

    def legal(self, row: int, drafts: np.ndarray) -> np.ndarray:
        """The drafts up to the first that the row's grammar does not allow now."""


class BatchFactory(Protocol):
    """Makes a step's tensors from plans. caches: of each layer; owners: the group of each cache;
    groups: what makes the attention plans, in order.
    """

    caches: tuple[Any, ...]
    owners: tuple[int, ...]
    groups: tuple[Any, ...]

    def build(self, plan: Plan, sample: np.ndarray) -> Batch:
        """The tensors of `plan`, valid until the next call. sample: [n] int64, the step's tokens
        whose logits are wanted.
        """

    def copy_tokens(
        self, plan: Plan, places: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> None:
        """Copy what the caches hold of tokens to other positions of their rows. places: [n] int64,
        rows by their place in the plan; sources, targets: [n] int64, positions. All are read before
        any is written. Raises UnsupportedError for caches that cannot do this.
        """


@frozen(eq=False, kw_only=True)
class BuiltModel:
    """A model that a worker has loaded. config: resolved; loaded: the model, its ops, pooler,
    adapters and cache groups; mesh: the ranks that share it, of which some give results.
    """

    config: Any
    loaded: Any
    platform: Any
    plugins: Any
    mesh: Any


@frozen(eq=False, kw_only=True)
class RunnerContext:
    """What a runner is given once caches are there.

    builder: of batches with the runner's own caches alone, None if it has none; own: which of the
    model's and parts' caches are its own. model_builder: of the model's batches. focus: see
    `PartRunner.focus`; None is said before something runs that belongs to no row. logits: of
    hidden states [n, hidden] that belong to rows [n]. rank, ranks: of those that share the model.
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


@frozen(eq=False, kw_only=True)
class RanStep:
    """A step whose tokens are known.

    tokens: row -> the tokens that it was just given. lasts: [rows of the plan] int64, the place of
    the last token of each that counts. hidden: [tokens, hidden]; layers: the same of the layers
    that runners asked for. batch: makes what the model ran on.
    """

    plan: Plan
    tokens: Mapping[int, np.ndarray]
    lasts: np.ndarray
    hidden: torch.Tensor
    layers: tuple[torch.Tensor, ...]
    batch: Callable[[], Batch]


class PartRunner:
    """The worker's half. Of `begin`, `collect`, `after` and `report` at most one returns a value in
    a step: it is the part's report.

    caches, backends: what it keeps for the tokens of rows, in blocks beside those of the model's
    layers, and the backends of those that bring their own; layers: those whose hidden states it
    wants in `RanStep.layers`; drafts: most tokens beyond the known ones that a row computes in a
    step; ahead: tokens beyond those of a step for which rows should have blocks; every: `after` is
    wanted also of steps in which no row gives a token; tokenless: rows that give no tokens.
    """

    caches: Sequence[CacheSpec] = ()
    backends: Mapping[AttentionSpec, AttentionBackend] = {}
    layers: tuple[int, ...] = ()
    drafts: int = 0
    ahead: int = 0
    every: bool = False
    tokenless: Collection[int] = ()

    def capacity(self) -> Mapping[str, Any]:
        """What the planner is to know, as plain values (`PlannerContext.values`)."""
        return {}

    def open(self, context: RunnerContext) -> None:
        """The caches are allocated; called once, before the first step."""

    def close(self) -> None:
        """Nothing follows."""

    # Before the model runs.

    def prepare(self, plan: Plan, value: Any) -> None:
        """Called before rows are admitted; value: what the planner said, or None."""

    def admit(self, start: RowStart, value: Any) -> None:
        """A row starts; value: of `PartPlanner.row_value`. A ModulmError ends the row alone."""

    def grammar(self, start: RowStart) -> Grammar | None:
        """What the tokens of a row that starts are held to; None: nothing. Called after `admit`,
        on ranks that give results. What it raises ends the row alone.
        """
        return None

    def release(self, row: int) -> None:
        """The row is gone; unknown ones are ignored."""

    def begin(self, plan: Plan, value: Any) -> object | None:
        """Called after rows were admitted, before the model runs; may report."""
        return None

    def recording(self, plan: Plan) -> str | None:
        """Which recording of the step can be repeated: None for the plain one, a name for one of
        its own, DIRECT if none can.
        """
        return None

    def watch(self, forward: Forward, plan: Plan) -> Forward:
        """The forward pass, or one around it that sees what passes through it."""
        return forward

    def focus(self, rows: np.ndarray | None, positions: np.ndarray | None) -> None:
        """What runs next is computed for these tokens: [n] rows (-1 for padding) and positions.
        Called before each pass of the model and before logits.
        """

    def amend_layout(self, plan: Plan, spec: AttentionSpec, layout: StepLayout) -> StepLayout:
        """How the plan's tokens see each other in layers of `spec`."""
        return layout

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        """The batch with what stands in it beside tokens."""
        return batch

    # After it ran: in the last pipeline stage.

    def collect(self, plan: Plan, hidden: torch.Tensor) -> object | None:
        """hidden: [tokens, hidden] of the whole step; may report."""
        return None

    def width(self, hidden: torch.Tensor) -> int | None:
        """How wide the vectors are that requests get of these hidden states; None: no say."""
        return None

    def verify(
        self,
        plan: Plan,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
    ) -> Verified | None:
        """Decide what of a step's drafted tokens the rows keep; arguments as `TokenChooser.verify`
        has them. None leaves it to the sampler.
        """
        return None

    def after(self, step: RanStep) -> object | None:
        """The step's tokens are known; may report."""
        return None

    def report(self) -> object | None:
        """What has happened since the last step."""
        return None


class StepPart(ABC):
    """Makes both halves, each where it lives, and packs what they tell each other.

    all_ranks: whether the reports of all ranks reach the planner, or those of the rank that gives
    results alone. masks: whether its runner sets `StepLayout.masks`: the model's layers are built
    with attention backends that support them.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    all_ranks: ClassVar[bool] = False
    masks: bool = False

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        """The part for an engine of this configuration, or None if it is off. config: resolved;
        plugins: the manager, to find drivers with.
        """
        return cls()

    def planner(self, context: PlannerContext) -> PartPlanner | None:
        """The scheduler's half; None where there is nothing to plan."""
        return None

    def runner(self, built: BuiltModel) -> PartRunner | None:
        """The worker's half for a model that was loaded; None where there is nothing to run.

        Called again when the worker wakes up, with the same model unless it was loaded anew.
        """
        return None

    def unload(self) -> None:
        """The worker releases the model: drop what belongs to it. Runners are closed already."""

    def close(self) -> None:
        """The worker is closed; may be called twice."""

    # Requests that the worker is told of before they have a row, and until they have ended.

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None] | None:
        """Get ready for a request whose text is constrained, beside the steps (see
        `Executor.prepare`); None: another part does. Raises QueueFull; any other trouble is the
        future's.
        """
        return None

    def forget(self, request: str) -> None:
        """A request that was prepared has ended, or will not come; unknown ones are ignored."""

    # Values as msgpack takes them; the defaults are for values that are plain already.

    def pack_plan(self, value: Any) -> Any:
        """A value of `Plan.parts`."""
        return value

    def unpack_plan(self, packed: Any) -> Any:
        """What `pack_plan` packed."""
        return packed

    def pack_row(self, value: Any) -> Any:
        """A value of `RowStart.parts`."""
        return value

    def unpack_row(self, packed: Any) -> Any:
        """What `pack_row` packed."""
        return packed

    def pack_report(self, value: Any) -> Any:
        """A value of `PartReport`."""
        return value

    def unpack_report(self, packed: Any) -> Any:
        """What `pack_report` packed."""
        return packed


def overridden(halves: Sequence[T], method: str) -> tuple[Any, ...]:
    """The bound methods of those halves that override `method` of their base."""
    bases = {"PartPlanner": PartPlanner, "PartRunner": PartRunner}
    found = []
    for half in halves:
        base = next(cls for cls in type(half).__mro__ if cls.__name__ in bases)
        if getattr(type(half), method) is not getattr(bases[base.__name__], method):
            found.append(getattr(half, method))
    return tuple(found)
