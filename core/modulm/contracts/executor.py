"""Executor: where the steps run (group `modulm.executors`), and the values that cross to it.

A plan holds all that a step needs, so that an executor may run it in this process, in another
one or on another machine. Plans and results are numpy and plain values: they serialise.
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

#: In a plan's tokens: the token that the row sampled in the step before (asynchronous scheduling).
PENDING = -1


@frozen(eq=False)
class RowStart:
    """What a row brings when it first runs; the runner keeps it until release.

    prompt: [tokens] int64; output: tokens that the row had produced before it was preempted.
    seed: of the row's random stream, always set for rows that are not greedy: the front end draws
    one where the request gives none, and gives each of n choices its own. A constraint on the text
    (`params.structured_outputs`) is compiled by the worker (`Executor.prepare`), which makes the
    matcher and replays `output`. stop_ids: tokens that min_tokens holds back (end of sequence
    unless ignored, stop_token_ids). bad_words: token sequences of `params.bad_words`. salt: rows
    of different salt are told nothing of one another (`Request.salt`). text: [n] int64, the
    prompt's tokens that are text; None if all are. parts: what the row brings to step parts, by
    their names.
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

    parts: what the planners of step parts tell their runners, by the names of the parts.
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
        """Whether there is nothing to run. A plan without rows may have something to say to the
        runners of step parts, or be made to hear from them.
        """
        return not len(self.rows) and not self.parts


@frozen(eq=False)
class RowLogprobs:
    """Log probabilities of one position: token ids and values, best first after the chosen one."""

    ids: np.ndarray
    values: np.ndarray
    rank: int


@frozen
class RowFailure:
    """Why a row ended. field: the request's field to blame, "" for several together; None: it is
    not the request's fault.
    """

    message: str
    field: str | None = None

    def __str__(self) -> str:
        return self.message


@frozen(eq=False)
class PartReport:
    """What the runner of a step part, on one rank, tells its planner."""

    part: str
    value: Any
    rank: int = 0


@frozen(eq=False)
class StepResult:
    """What a step gave.

    tokens: [sum(accepted)] int64, what the sampling rows gave, in the plan's order. accepted:
    [sampling rows] int32, how many tokens each of them gave, 0 if it failed, is pooled or is
    unfinished; None: one each. logprobs: row -> one entry for each of its tokens. prompt_logprobs:
    row -> one entry for each of the prompt's tokens `start + 1 ... start + count` (the first token
    has none). errors: row -> why it failed; the other rows are unhurt; a row that failed reports it
    again in every later plan until it is released. unfinished: rows that gave no token in this
    step and go on from where they stood before it. parts: what step parts report, of this step and
    of all ranks. seconds: time the step took in the executor. routed: [experts] int64, how many
    times tokens chose each expert, where that is counted.
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
    """A cache group's pool: kind ("attention", "state" or "cross"), tokens per block, the window in
    tokens (None: all), and blocks, the null block included.
    """

    kind: str
    block_size: int
    window: int | None
    blocks: int


@frozen
class Capacity:
    """What an executor can hold once the model is loaded.

    groups: one entry per cache group. vocabulary: the width of the logits, which may differ from
    the tokenizer's length. parts: what the runners of step parts say of theirs, by name; a part
    that is not in it has nothing to plan. ranks: how many share the model.
    """

    groups: tuple[GroupCapacity, ...]
    vocabulary: int
    max_model_len: int
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    ranks: int = 1


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


class WorkerHandle(Protocol):
    """The worker as worker functions see it. rank: of `config.parallel.ranks`; model: its part."""

    config: EngineConfig
    rank: int

    @property
    def model(self) -> Model: ...


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

    def call(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a function in each worker, after the steps that were submitted, and return the
        answers by rank.

        function: the name of a worker function (group `modulm.worker_functions`), of a method that
        `--worker-cls` or `--worker-extension-cls` adds to the worker, "module:name", or a function
        itself, which other processes import by its name. Functions take a `WorkerHandle` first.
        Between processes arguments and answers are plain values: numbers, strings, bytes, lists,
        dicts, numpy arrays.

        timeout: seconds to wait. What was called goes on afterwards, and later steps wait for it.
        Raises EngineTimeout; EngineError that names the rank on which it raised; NotFound for an
        unknown name; RequestError for arguments that cannot be sent.
        """
        raise self._lacks("calls into workers")

    def profile(self, folder: str | None) -> None:
        """Record what the steps spend their time on; write it into `folder` when told None."""
        raise self._lacks("profile")

    @abstractmethod
    def stop(self) -> None:
        """Release everything; may be called twice."""

    def _lacks(self, operation: str) -> UnsupportedError:
        return UnsupportedError(f"executor {self.name} does not support this: {operation}")
