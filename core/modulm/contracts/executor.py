"""Executor: where steps run (group `modulm.executors`), and the values it exchanges.

A plan contains everything that a step needs, so an executor may run it in this process, in another
one or on another machine. Plans and results are numpy arrays and plain values; they serialize.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from attrs import field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.decision import Decision
    from modulm.contracts.model import Model
    from modulm.contracts.platform import Platform
    from modulm.contracts.sampling import PoolingParams, SamplingParams, StructuredOutputs
    from modulm.errors import EngineDead

__all__ = [
    "API",
    "PENDING",
    "Capacity",
    "Executor",
    "GroupCapacity",
    "ModelDescription",
    "PartReport",
    "Plan",
    "RowFailure",
    "RowLogprobs",
    "RowStart",
    "StepResult",
    "WorkerHandle",
]

API = 3

#: Placeholder in `Plan.tokens` for the row's token of the previous step (async scheduling).
PENDING = -1


@frozen(eq=False)
class RowStart:
    """A new row, sent with its first step. The runner keeps it until the row is released.

    prompt: [tokens] int64. output: tokens generated before the row was preempted. seed: of the
    row's random stream, always set unless it is greedy; the front end draws one per choice if the
    request has none. `params.structured_outputs` is compiled by the worker (`Executor.prepare`),
    which makes the matcher and replays `output`. stop_ids: tokens suppressed until min_tokens (end
    of sequence unless ignored, stop_token_ids). bad_words: token sequences of `params.bad_words`.
    salt: rows with different salts must not influence each other (`Request.salt`). text: [n]
    int64, the prompt's text tokens; None: all of them. parts: values for step parts, by name.
    """

    row: int
    request: str
    params: SamplingParams | PoolingParams
    prompt: np.ndarray
    output: np.ndarray
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    salt: str | None = None
    text: np.ndarray | None = None
    parts: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class Plan:
    """The immutable description of one engine step.

    rows: [rows] int32, stable row indices. starts: [rows] int32, tokens computed before the step.
    counts: [rows] int32, tokens to compute now. tokens: [sum(counts)] int64, with PENDING for
    those not known yet. tables: per cache group [rows, blocks] int32. samples: [rows] bool, whether
    the row samples a token at its last position. Releases take effect before admissions, so a plan
    may give a freed row to another request.

    drafted: [rows] int32, how many of a row's last tokens are drafts to verify; None if no row has
    any. A row with d drafts computes its last known token and the drafts, and yields 1 to d + 1
    tokens: the drafts up to the first mismatch, plus the model's own token. Its next step starts
    after them and overwrites the cache entries of rejected drafts. state_slots: for each group of
    recurrent states, [rows, most drafts] int32, the slots for the states after a drafted row's
    tokens, except the last, whose slot is in the table (0: none); None for other groups; () if no
    row has drafts. The states are bit-identical to those of single steps.

    parts: values from the planners of step parts to their runners, by part.
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
    parts: Mapping[str, Any] = field(factory=dict)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run: no rows, and no values for step parts."""
        return not len(self.rows) and not self.parts


@frozen(eq=False)
class RowLogprobs:
    """Log probabilities of one position: the chosen token first, then the best ones in order."""

    ids: np.ndarray
    values: np.ndarray
    rank: int


@frozen
class RowFailure:
    """Why a row failed.

    field: the request's field that caused it; "" for several; None if the request is not at fault.
    """

    message: str
    field: str | None = None

    def __str__(self) -> str:
        return self.message


@frozen(eq=False)
class PartReport:
    """A value from a step part's runner on one rank to its planner."""

    part: str
    value: Any
    rank: int = 0


@frozen(eq=False)
class StepResult:
    """The result of a step.

    tokens: [sum(accepted)] int64, new tokens of the sampling rows, in the plan's order. accepted:
    [sampling rows] int32, number of new tokens per row, 0 if it failed, is pooled or is
    unfinished; None: one each. logprobs: row -> one entry per new token. prompt_logprobs: row ->
    one entry per prompt token `start + 1 ... start + count` (the first token has none). errors:
    row -> why it failed; other rows are not affected; a failed row is reported in every result
    until it is released. unfinished: rows that got no token and continue from their state before
    the step. parts: reports of step parts, from all ranks. seconds: duration in the executor.
    routed: [experts] int64, tokens routed to each expert, if that is counted.
    """

    step: int
    tokens: np.ndarray
    accepted: np.ndarray | None = None
    logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(factory=dict)
    prompt_logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(factory=dict)
    errors: Mapping[int, RowFailure] = field(factory=dict)
    unfinished: tuple[int, ...] = ()
    parts: tuple[PartReport, ...] = ()
    seconds: float = 0.0
    routed: np.ndarray | None = None


@frozen
class GroupCapacity:
    """The block pool of a cache group.

    kind: "attention", "state" or "cross". block_size: tokens. window: tokens that a query can see;
    None: all. blocks: including the null block.
    """

    kind: str
    block_size: int
    window: int | None
    blocks: int


@frozen
class Capacity:
    """Capacity of an executor once the model is loaded.

    groups: one entry per cache group. vocabulary: width of the logits, which may differ from the
    tokenizer's length. parts: `PartRunner.capacity` by part; parts without an entry have no
    planner. ranks: how many share the model.
    """

    groups: tuple[GroupCapacity, ...]
    vocabulary: int
    max_model_len: int
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    ranks: int = 1


@frozen(kw_only=True)
class ModelDescription:
    """Facts about a loaded model, as plain values.

    tasks: what requests may ask for. width: length of embeddings. pooling: its settings, by the
    names of `--pooler-config`. weight_bytes: memory of the weights. decisions: choices of drivers
    and their reasons. media_family: `Model.media_family`.
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


class WorkerHandle(Protocol):
    """The worker as worker functions see it. rank: of `config.parallel.ranks`. model: its shard."""

    config: EngineConfig
    rank: int
    platform: Platform

    @property
    def model(self) -> Model: ...


class Executor(ABC):
    """Carries plans to one or more workers and returns their results.

    Only `prepare`, `forget` and the adapter methods may be called while steps run, from any
    thread. Operations that an executor lacks raise UnsupportedError.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Only for offline engines: every process runs the whole program, so there is no server.
    offline_only: ClassVar[bool] = False

    @abstractmethod
    def start(self, config: EngineConfig) -> Capacity:
        """Load the model and allocate its caches."""

    @abstractmethod
    def run(self, plan: Plan) -> StepResult:
        """Run one step. An exception fails the whole step."""

    def submit(self, plan: Plan) -> Future[StepResult]:
        """Start one step; steps run in the order of submission. By default it runs at once."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.run(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def watch(self, died: Callable[[EngineDead], None]) -> None:
        """Call `died`, on any thread, when the executor stops working, also between steps."""

    def describe(self) -> ModelDescription:
        """Describe the loaded model."""
        return ModelDescription()

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        """Compile a request's constraint in the background, before the request is scheduled.

        The future fails with RequestError if the constraint is invalid or too complex. Raises
        QueueFull if too many are being compiled.
        """
        raise self._lacks("structured outputs")

    def forget(self, request: str) -> None:
        """Drop a prepared request that has ended or was cancelled."""

    def check(self) -> None:
        """Raise if the executor cannot continue. Called after a failed step."""
        raise self._lacks("check")

    def sleep(self, level: int) -> None:
        """Free the caches (level 1), or the caches and the weights (level 2)."""
        raise self._lacks("sleep")

    def wake_up(self) -> None:
        """Restore what `sleep` freed; the caches are empty and have their former size."""
        raise self._lacks("wake up")

    def add_adapter(self, name: str, path: Path) -> None:
        """Read an adapter's files. Running rows of an adapter that is read again use the new ones.

        Raises CheckpointError naming the file and what does not fit.
        """
        raise self._lacks("add adapters")

    def prepare_adapter(self, name: str) -> None:
        """Load an added adapter into host memory, so that its first step reads no files.

        Raises like `add_adapter`, and EngineError for an unknown adapter.
        """
        raise self._lacks("prepare adapters")

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; running rows finish with it. Raises EngineError if it is unknown."""
        raise self._lacks("remove adapters")

    def call(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a function in each worker, after all submitted steps; return the results by rank.

        function: the name of a worker function (group `modulm.worker_functions`), of a method that
        `--worker-cls` or `--worker-extension-cls` adds to the worker, "module:name", or a function
        that other processes can import by name. It gets a `WorkerHandle` as its first argument.
        Between processes, arguments and results are plain values: numbers, strings, bytes, lists,
        dicts, numpy arrays.

        timeout: seconds to wait; the call continues after that, and later steps wait for it.
        Raises EngineTimeout; EngineError naming the rank that raised; NotFound for an unknown
        name; RequestError for arguments that cannot be sent.
        """
        raise self._lacks("calls into workers")

    def profile(self, folder: str | None) -> None:
        """Start profiling steps into `folder`; None stops and writes the trace."""
        raise self._lacks("profile")

    @abstractmethod
    def stop(self) -> None:
        """Release everything; may be called twice."""

    def _lacks(self, operation: str) -> UnsupportedError:
        return UnsupportedError(f"executor {self.name} does not support: {operation}")
