"""The scheduler's half: gives requests the experts of their tokens, also of cached ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import PartPlanner, PlannerContext
from modulm.errors import RequestError
from modulm_expert_routes.requests import FIELD, START, Replay, is_salted, routes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm.contracts.executor import PartReport, Plan
    from modulm.contracts.requests import Request
    from modulm.contracts.step_part import WaitingRequest

__all__ = ["ReplayRefused", "RoutesPlanner"]

#: Start of requests that do not generate: behind all tokens.
_NONE = sys.maxsize


class ReplayRefused(PartPlanner):
    """Refuses requests about routed experts if the engine does not return them."""

    def check(self, request: Request) -> None:
        replay = routes_of(request.params)
        for name, wanted in ((FIELD, replay.experts is not None), (START, replay.start)):
            if wanted:
                message = f"{name}: start the engine with --enable-return-routed-experts"
                raise RequestError(message, name)


@frozen(eq=False)
class _Block:
    """The routes of a full block, [block size, layers, top_k], after those of the block before.

    Blocks hold the ones before them, so that the last block of a cached prefix has them all,
    whichever of them the prefix cache still has.
    """

    routes: np.ndarray
    before: _Block | None

    def prefix(self) -> list[np.ndarray]:
        """Return the routes of all blocks up to this one."""
        routes: list[np.ndarray] = []
        block: _Block | None = self
        while block is not None:
            routes.append(block.routes)
            block = block.before
        return routes[::-1]


@define(eq=False)
class _Row:
    """A running row. chain: names of its blocks, or None without a prefix cache.

    last, full: its last full block and their number. rest: routes of the tokens after it. cached:
    routes of the cached prefix that the request has not been given yet.
    """

    request: Request
    chain: Any
    last: _Block | None = None
    full: int = 0
    rest: list[np.ndarray] = field(factory=list)
    cached: list[np.ndarray] = field(factory=list)


class RoutesPlanner(PartPlanner):
    """Keeps routes beside the blocks of the prefix cache, in host memory, as long as these.

    A request's routes go out with the step that computed them; those of its cached prompt with its
    first step. What a preempted request computes again does not go out again.
    """

    def __init__(self, context: PlannerContext) -> None:
        values = context.values
        self._shape = int(values["layers"]), int(values["top_k"])
        self._experts = int(values["experts"])
        self._dtype = np.uint8 if self._experts <= 256 else np.uint16
        self._longest = context.capacity.max_model_len
        self._size = context.cache.sizes[0] if context.cache.sizes else 0
        if self._size:
            pairs = zip(context.capacity.groups, context.cache.groups, strict=True)
            next(group for made, group in pairs if made.block_size == self._size).watch(self._watch)
        self._blocks: dict[bytes, _Block] = {}
        #: Blocks that have entered the prefix cache, and whose routes are not here yet.
        self._new: set[bytes] = set()
        self._rows: dict[int, _Row] = {}
        #: Request -> the tokens whose routes it has been given, or does not want.
        self._given: dict[str, int] = {}
        self._lost: set[str] = set()
        self._step: tuple[Plan, np.ndarray] | None = None
        self._news: dict[int, list[np.ndarray]] = {}

    def _watch(self, name: bytes, stored: bool) -> None:
        if stored:
            self._new.add(name)
        else:
            self._new.discard(name)
            self._blocks.pop(name, None)

    # Requests.

    def check(self, request: Request) -> None:
        """Raise RequestError for a start behind the prompt, or experts that the model lacks."""
        replay = routes_of(request.params)
        if replay.start > request.prompt_len:
            message = (
                f"{START}: {replay.start} is more than the prompt's {request.prompt_len} tokens"
            )
            raise RequestError(message, START)
        if replay.experts is not None:
            self._check_experts(request, replay, replay.experts)

    def _check_experts(self, request: Request, replay: Replay, experts: np.ndarray) -> None:
        tokens, *shape = experts.shape
        most = request.limit(self._longest) - replay.start
        if tuple(shape) != self._shape:
            layers, top_k = self._shape
            message = (
                f"its shape is {list(experts.shape)}; the model has [tokens, {layers}, {top_k}]"
            )
        elif tokens > most:
            message = f"experts of {tokens} tokens from {replay.start} on; at most {most} follow"
        elif experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self._experts:
            message = f"expert {int(experts.max())}: the model has 0 to {self._experts - 1}"
        elif not np.diff(np.sort(experts, axis=-1), axis=-1).astype(bool).all():
            message = "the same expert twice for one token"
        elif not is_salted(request.salt, replay):
            message = "the request's salt must be that of modulm_expert_routes.with_replay_salt"
        else:
            return
        raise RequestError(f"{FIELD}: {message}", FIELD)

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        request = waiting.request
        if request.id not in self._given:
            generates = isinstance(request.params, SamplingParams)
            self._given[request.id] = routes_of(request.params).start if generates else _NONE
        chain = waiting.chains[0] if waiting.chains else None
        self._rows[row] = _Row(request, chain)

    def joined(self, request: Request, row: int, start: int, count: int) -> None:
        """Look up the routes of the cached prefix."""
        state = self._rows[row]
        if not start:
            return
        full, rest = divmod(start, self._size)
        names = state.chain.names if state.chain is not None else ()
        block = self._blocks.get(names[full - 1]) if not rest and full <= len(names) else None
        if block is None:
            self._lost.add(request.id)
            return
        state.last, state.full = block, full
        if (given := self._given[request.id]) < start:
            state.cached = [np.concatenate(block.prefix())[given:]]
            self._given[request.id] = start

    def load(self, waiting: WaitingRequest, row: int, cached: int, tokens: int) -> None:
        """Called if another part loads blocks, whose routes nobody knows."""
        self._lost.add(waiting.request.id)

    def row_value(self, request: Request) -> list[Any] | None:
        if request.id in self._lost:
            return [0, None]
        replay = routes_of(request.params)
        return None if replay.experts is None else [replay.start, replay.experts]

    def release(self, request: Request, row: int) -> None:
        self._rows.pop(row, None)

    def finished(self, request: str) -> None:
        self._given.pop(request, None)
        self._lost.discard(request)

    # Steps.

    def receive(self, plan: Plan, report: PartReport) -> None:
        value: Any = report.value
        routes = value if isinstance(value, np.ndarray) else value.wait()[0]
        self._step = plan, routes.astype(self._dtype)

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """Divide the step's routes among its rows."""
        self._news = {}
        if self._step is None:
            return
        (plan, routes), self._step = self._step, None
        firsts = np.cumsum(plan.counts) - plan.counts
        places = {row: index for index, row in enumerate(plan.rows.tolist())}
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            state, index = self._rows.get(row), places.get(row)
            if state is None or index is None or state.request.id in self._lost:
                continue
            start, first = int(plan.starts[index]), int(firsts[index])
            computed = routes[first : first + end - start]
            news, state.cached = state.cached, []
            given = self._given[state.request.id]
            if given < end:
                news = [*news, computed[max(given - start, 0) :]]
                self._given[state.request.id] = end
            if news:
                self._news[row] = news
            if state.chain is not None:
                self._keep(state, computed)
        self._new.clear()

    def _keep(self, state: _Row, computed: np.ndarray) -> None:
        """Keep the routes of blocks that are full now."""
        state.rest.append(computed)
        size = self._size
        if sum(map(len, state.rest)) < size:
            return
        rest = np.concatenate(state.rest)
        names = state.chain.names
        while len(rest) >= size:
            state.last = _Block(rest[:size].copy(), state.last)
            rest = rest[size:]
            if state.full < len(names) and (name := names[state.full]) in self._new:
                self._blocks[name] = state.last
            state.full += 1
        state.rest = [rest.copy()] if len(rest) else []

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        news, self._news = self._news, {}
        if not news:
            return {}
        return {
            "arrays": {
                names[row]: {FIELD: routes[0] if len(routes) == 1 else np.concatenate(routes)}
                for row, routes in news.items()
                if row in names
            }
        }

    def fail(self, plan: Plan) -> None:
        self._step = None

    def forget(self, idle: bool) -> None:
        self._blocks.clear()
        self._new.clear()
