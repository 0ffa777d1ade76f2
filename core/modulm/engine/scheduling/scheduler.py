"""Scheduler: one token budget per step, shared by every sequence that has tokens to catch up on.

There is no prefill or decode phase: a row has `known` tokens, of which `computed` have been
through the model, and each step takes it further. Running rows go first, then waiting requests
in the policy's order. When blocks run out, a row of the policy's choice is preempted and computed
again later, to the same text.

Planning is optimistic: it counts the tokens of the step as computed and appends a placeholder for
the token that each row will sample; `commit` fills it in. So the next step can be planned while
one runs. A result for a row that ended or was preempted in between is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import define, field, frozen

from modulm.contracts.executor import PENDING, Capacity, Plan, RowStart, StepResult
from modulm.contracts.policy import Policy, Scheduler
from modulm.contracts.requests import Finish, Reason, Request, Start, StepEvents, StepStats
from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.scheduling.prefix_reuse import PrefixReuse
from modulm.engine.scheduling.request_queue import Entry, RequestQueue
from modulm.engine.scheduling.row_table import RowTable
from modulm.errors import EngineError, QueueFull, RequestError, RowError

__all__ = ["BudgetScheduler", "Limits"]


@frozen(kw_only=True)
class Limits:
    """What a step and the queue may hold.

    rows: sequences that run at once; tokens: per step; chunked: whether prompts may be split over
    steps; long: prompts are taken in chunks of at most this many tokens (0: no such bound);
    partial, long_partial: how many prompts, and how many longer than `long`, may be unfinished at
    once (None: any number); spare: share of blocks left free when a request joins others;
    reserve: admit a request only if all its tokens fit now; prefixes, hash: prefix reuse;
    queued_requests, queued_tokens: bounds of the queue (None: none).
    """

    rows: int = 256
    tokens: int = 2048
    chunked: bool = True
    long: int = 0
    partial: int | None = None
    long_partial: int | None = None
    spare: float = 0.0
    reserve: bool = True
    prefixes: bool = True
    hash: str = "sha256"
    queued_requests: int | None = None
    queued_tokens: int | None = None


@define(eq=False)
class _Draft:
    """A step in the making. starts: tokens computed before, counts: tokens to compute; one_each:
    every row decodes, that is computes its last known token and samples the next.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    one_each: bool = False
    admit: tuple[RowStart, ...] = ()
    started: list[Start] = field(factory=list)


class _Intake:
    """How much of the budget a waiting request gets, given what was handed out before it."""

    def __init__(
        self, limits: Limits, left: int, unfinished: list[int], unit: int, patient: bool
    ) -> None:
        self.left = left
        self._unit = unit
        self._patient = patient
        self._limits = limits
        self._partial = len(unfinished)
        self._long = sum(tokens > limits.long for tokens in unfinished)

    def portion(self, entry: Entry, missing: int) -> int | None:
        """Tokens to compute of `missing`; 0: not now, but others may; None: nobody any more."""
        limits = self._limits
        if not limits.chunked:
            return missing if missing <= self.left else None
        count = min(missing, self.left, limits.long or missing)
        if count == missing:
            return count
        if self._patient and count < self._unit:
            return 0
        count = count - count % self._unit or count
        if limits.partial is not None and self._partial >= limits.partial:
            return 0
        many = limits.long_partial is not None and self._long >= limits.long_partial
        return 0 if many and limits.long and entry.tokens > limits.long else count

    def take(self, entry: Entry, count: int, missing: int) -> None:
        """The request was admitted with `count` of the `missing` tokens."""
        self.left -= count
        if count < missing:
            self._partial += 1
            self._long += entry.tokens > self._limits.long


@define(eq=False)
class _Flight:
    """A plan whose result is not in: its rows, where they will stand, and whose they were."""

    plan: Plan
    rows: np.ndarray
    ends: np.ndarray
    sampled: np.ndarray
    places: np.ndarray
    epochs: np.ndarray
    generation: int
    started: list[Start]
    seconds: float


class BudgetScheduler(Scheduler):
    """The built-in scheduler. Not safe for use by several threads."""

    def __init__(self, limits: Limits, capacity: Capacity, policy: Policy) -> None:
        self.limits = limits
        self.policy = policy
        self.table = RowTable(limits.rows, capacity.max_model_len)
        self.cache = KVCacheManager(capacity, limits.rows)
        self.sharing = PrefixReuse(self.cache, self.table, limits.hash, limits.prefixes)
        self.queue = RequestQueue(policy)
        self._max_len = min(capacity.max_model_len, self.cache.most(limits.tokens))
        if not (limits.chunked or capacity.groups):
            self._max_len = min(self._max_len, limits.tokens)
        self._entries: dict[str, Entry] = {}
        self._running: dict[int, Entry] = {}
        self._prefilling: set[int] = set()
        self._flights: deque[_Flight] = deque()
        self._released: list[int] = []
        self._arrivals = self._steps = self._preempted = 0
        # Counts releases: while it stands still, every planned row is still the same sequence.
        self._generation = 0
        self._order: np.ndarray | None = None
        self._order32 = np.zeros(0, dtype=np.int32)
        self._ones = np.ones(limits.rows, dtype=np.int64)
        self._ones32 = np.ones(limits.rows, dtype=np.int32)
        self._true = np.ones(limits.rows, dtype=np.bool_)

    @property
    def busy(self) -> bool:
        return bool(self._entries or self._flights)

    @property
    def max_len(self) -> int:
        return self._max_len

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    # Requests come and go.

    def check_room(self, requests: int, tokens: int) -> None:
        free = self.table.free
        bound = self.limits.queued_requests
        if bound is not None and len(self.queue) + requests > bound + free:
            raise QueueFull(f"{len(self.queue)} requests are waiting already; try again later")
        bound = self.limits.queued_tokens
        if bound is not None and not free and self.queue.tokens + tokens > bound:
            raise QueueFull(f"{self.queue.tokens} tokens are waiting already; try again later")

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, or RequestError if it can never run."""
        if request.id in self._entries:
            raise RequestError(f"request id {request.id!r} is in use", "request_id")
        limit = request.limit(self._max_len)
        if not request.prompt_len:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.prompt_len > self._max_len or limit <= request.prompt_len:
            raise RequestError(
                f"the prompt has {request.prompt_len} tokens; together with the answer there may "
                f"be {self._max_len}", "prompt",
            )  # fmt: skip
        if not self.limits.chunked and request.prompt_len > self.limits.tokens:
            raise RequestError(
                f"the prompt has {request.prompt_len} tokens, one step takes {self.limits.tokens}, "
                "and prompts are not split over steps (enable_chunked_prefill)", "prompt",
            )  # fmt: skip
        self.check_room(1, request.prompt_len)
        entry = Entry(request, self._arrivals, limit)
        self._arrivals += 1
        self._entries[request.id] = entry
        self.queue.push(entry)

    def abort(self, request: str) -> Finish | None:
        """End a request now and free what it holds; None if there is no such request."""
        entry = self._entries.get(request)
        if entry is None:
            return None
        if entry.row is not None:
            return self._finish(entry.row, "abort")
        self.queue.remove(entry)
        del self._entries[request]
        return Finish(request, "abort")

    def gauges(self) -> StepStats:
        return StepStats(self._steps, len(self._running), len(self.queue), self.cache.usage)

    def forget_prefixes(self) -> None:
        self.sharing.forget()

    # A step is planned.

    def plan(self) -> Plan:
        """The next step; its rows are empty when there is nothing to do."""
        began = time.perf_counter()
        preempted = self._preempted
        draft = self._continue()
        if len(self.queue) and self.table.free and self._preempted == preempted:
            draft = self._join(draft)
        return self._assemble(draft, began)

    def _continue(self) -> _Draft:
        """The running rows' part; rows are preempted until the others have their blocks."""
        while True:
            draft = self._share()
            if not len(draft.rows) or self.cache.grow(draft.rows, draft.starts + draft.counts):
                return draft
            self._preempt()

    def _share(self) -> _Draft:
        """Divide the budget among running rows in their order of admission."""
        table, rows = self.table, self._ordered()
        starts = table.computed[rows]
        known = table.known[rows]
        # A row whose last token is being sampled already has nothing left to compute.
        open_ends = known < table.limit[rows]
        if not self._prefilling and len(rows) <= self.limits.tokens and open_ends.all():
            return _Draft(rows, starts, self._ones[: len(rows)], one_each=True)
        wants = np.where(open_ends, known - starts, 0)
        if self.limits.long:
            np.minimum(wants, self.limits.long, out=wants)
        before = np.cumsum(wants) - wants
        counts = self._cut(starts, np.clip(self.limits.tokens - before, 0, wants), known)
        chosen = counts > 0
        if not chosen.all():
            rows, starts, counts = rows[chosen], starts[chosen], counts[chosen]
        return _Draft(rows, starts, counts, one_each=not self._prefilling)

    def _cut(self, starts: np.ndarray, counts: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Prompts that stay unfinished end at a multiple of the cache's unit if they reach one."""
        ends = starts + counts
        whole = np.maximum(ends - ends % self.cache.unit, starts)
        unfinished = ends < known
        if not self._patient():
            unfinished &= whole > starts
        cut: np.ndarray = np.where(unfinished, whole - starts, counts)
        return cut

    def _patient(self) -> bool:
        """Whether a prompt waits rather than end within a unit, where nothing could be kept of it.

        Rows that decode leave the others a unit per step then, so the first of them goes on.
        """
        decoding = len(self._running) - len(self._prefilling)
        room = min(self.limits.tokens - decoding, self.limits.long or self.limits.tokens)
        return 1 < self.cache.unit <= room

    def _ordered(self) -> np.ndarray:
        """Running rows in order of admission; the same array until a row comes or goes."""
        if self._order is None:
            self._order = np.fromiter(self._running, dtype=np.int64, count=len(self._running))
            self._order32 = self._order.astype(np.int32)
        return self._order

    def _preempt(self) -> None:
        """The policy's victim gives its blocks back and queues again with the tokens it has."""
        entries = list(self._running.values())
        entry = entries[self.policy.victim([entry.request for entry in entries])]
        if entry.row is None:
            raise EngineError(f"running request {entry.request.id!r} has no row")
        entry.history = self._release(entry.row)
        entry.row = None
        entry.preemptions += 1
        self._preempted += 1
        self.queue.push(entry)

    def _join(self, draft: _Draft) -> _Draft:
        """Admit waiting requests into what is left of the budget."""
        unfinished = [self._running[row].tokens for row in self._prefilling]
        left = self.limits.tokens - int(draft.counts.sum())
        intake = _Intake(self.limits, left, unfinished, self.cache.unit, self._patient())
        joined: list[tuple[Entry, Hit, int]] = []
        skipped: list[Entry] = []
        while intake.left > 0 and self.table.free > len(skipped):
            entry = self.queue.peek()
            if entry is None:
                break
            hit = self.sharing.lookup(entry)
            missing = 0 if hit is None else entry.tokens - hit.tokens
            count = 0 if hit is None else intake.portion(entry, missing)
            if hit is None or count == 0:
                skipped.append(self.queue.pop())
                continue
            if count is None or not self._admit(entry, hit, count):
                break
            self.queue.pop()
            intake.take(entry, count, missing)
            joined.append((entry, hit, count))
        for entry in skipped:
            self.queue.push(entry)
        return self._extended(draft, joined) if joined else draft

    def _admit(self, entry: Entry, hit: Hit, count: int) -> bool:
        """Give the entry a row and blocks; False if there are too few blocks."""
        known = entry.tokens if self.limits.reserve else hit.tokens + count
        spare = self.limits.spare if self._running else 0.0
        row = self.table.next_row
        if not self.cache.admit(row, hit, known, hit.tokens + count, spare):
            return False
        self.table.admit(entry.request, entry.history, hit.tokens, entry.limit)
        self.sharing.admit(entry, row, hit)
        entry.row = row
        self._running[row] = entry
        self._order = None
        if hit.tokens + count < entry.tokens:
            self._prefilling.add(row)
        return True

    def _extended(self, draft: _Draft, joined: list[tuple[Entry, Hit, int]]) -> _Draft:
        """The draft with the rows that were just admitted."""
        now = time.monotonic()
        rows = [entry.row for entry, _, _ in joined]
        return _Draft(
            np.concatenate([draft.rows, rows]).astype(np.int64),
            np.concatenate([draft.starts, [hit.tokens for _, hit, _ in joined]]).astype(np.int64),
            np.concatenate([draft.counts, [count for _, _, count in joined]]).astype(np.int64),
            admit=tuple(_row_start(entry) for entry, _, _ in joined),
            started=[
                Start(entry.request.id, hit.tokens, now)
                for entry, hit, _ in joined
                if not entry.preemptions
            ],
        )

    def _assemble(self, draft: _Draft, began: float) -> Plan:
        """Make the plan and advance the table as if it had run."""
        table, rows, counts = self.table, draft.rows, draft.counts
        ends = draft.starts + counts
        if draft.one_each:
            samples, sampled, places = self._true[: len(rows)], rows, ends
            tokens = table.tokens[rows, draft.starts].astype(np.int64)
        else:
            samples = ends == table.known[rows]
            sampled, places = rows[samples], ends[samples]
            tokens = table.gather(rows, draft.starts, counts)
            self._prefilling.difference_update(sampled.tolist())
        table.computed[rows] = ends
        table.tokens[sampled, places] = PENDING
        table.known[sampled] = places + 1
        plan = Plan(
            self._steps,
            self._order32 if rows is self._order else rows.astype(np.int32),
            draft.starts.astype(np.int32),
            self._ones32[: len(rows)] if draft.one_each else counts.astype(np.int32),
            tokens,
            self.cache.tables(rows),
            samples,
            draft.admit,
            tuple(self._released),
        )
        if len(rows):
            self._steps += 1
            self._released.clear()
            self._flights.append(_Flight(
                plan, rows, ends, sampled, places, table.epoch[rows], self._generation,
                draft.started, time.perf_counter() - began,
            ))  # fmt: skip
        return plan

    # A step's result comes in.

    def commit(self, plan: Plan, result: StepResult) -> StepEvents:
        """Take the result of the oldest plan that has none yet."""
        flight = self._land(plan)
        table = self.table
        failed = self._fail_rows(flight, result.errors) if result.errors else []
        rows, ends, sampled, places = flight.rows, flight.ends, flight.sampled, flight.places
        tokens = result.tokens
        if result.accepted is not None:
            tokens = np.full(len(sampled), PENDING, dtype=np.int64)
            tokens[result.accepted > 0] = result.tokens
        if flight.generation != self._generation:
            alive = table.epoch[rows] == flight.epochs
            heard = alive[plan.samples]
            rows, ends = rows[alive], ends[alive]
            sampled, places, tokens = sampled[heard], places[heard], tokens[heard]
        table.tokens[sampled, places] = tokens
        self.sharing.advance(rows, ends)
        self.cache.trim(rows, ends)
        stopped = table.stopped(sampled, tokens, places + 1)
        ended = (stopped | (places + 1 >= table.limit[sampled])).nonzero()[0].tolist()
        names, ids = table.names[sampled].tolist(), tokens.tolist()
        extras: dict[str, Any] = {}
        if result.logprobs or result.prompt_logprobs or result.pooled:
            extras = self._extras(result, flight, rows)
        finished = [self._end(int(sampled[i]), ids[i], bool(stopped[i])) for i in ended]
        if result.pooled:
            names = [name for name, token in zip(names, ids, strict=True) if token >= 0]
            ids = [token for token in ids if token >= 0]
        return StepEvents(
            requests=names,
            tokens=ids,
            started=flight.started,
            finished=failed + finished,
            stats=self._stats(flight, result, len(ids)),
            **extras,
        )

    def fail(self, plan: Plan, error: Exception) -> list[Finish]:
        """The step raised: what it ran ends with `error`, as its memory is in doubt."""
        flight = self._land(plan)
        alive = self.table.epoch[flight.rows] == flight.epochs
        rows = flight.rows[alive].tolist()
        return [self._finish(row, "error", error=error) for row in rows]

    def _land(self, plan: Plan) -> _Flight:
        flight = self._flights.popleft()
        if flight.plan is not plan:
            raise EngineError(f"step {plan.step} came in before step {flight.plan.step}")
        return flight

    def _fail_rows(self, flight: _Flight, errors: Mapping[int, str]) -> list[Finish]:
        """End the rows that failed; an executor repeats errors until a row is released."""
        epochs = dict(zip(flight.rows.tolist(), flight.epochs.tolist(), strict=True))
        return [
            self._finish(row, "error", error=RowError(sentence))
            for row, sentence in errors.items()
            if epochs.get(row) == int(self.table.epoch[row])
        ]

    def _extras(self, result: StepResult, flight: _Flight, rows: np.ndarray) -> dict[str, Any]:
        """What the executor gave beside tokens, by request instead of by row."""
        names = {row: self.table.names[row] for row in rows.tolist()}
        starts = dict(zip(flight.rows.tolist(), flight.plan.starts.tolist(), strict=True))
        return {
            "logprobs": {names[r]: given for r, given in result.logprobs.items() if r in names},
            "pooled": {names[r]: given for r, given in result.pooled.items() if r in names},
            "prompt_logprobs": {
                names[row]: (starts[row] + 1, entries)
                for row, entries in result.prompt_logprobs.items()
                if row in names
            },
        }

    def _stats(self, flight: _Flight, result: StepResult, generated: int) -> StepStats:
        queried, hits = self.sharing.take_counts()
        preempted, self._preempted = self._preempted, 0
        return self.gauges()._replace(
            computed=len(flight.plan.tokens),
            generated=generated,
            preempted=preempted,
            queried=queried,
            hit=hits,
            plan_seconds=flight.seconds,
            run_seconds=result.seconds,
        )

    def _end(self, row: int, token: int, stopped: bool) -> Finish:
        request = self._running[row].request
        if stopped:
            return self._finish(row, "stop", stop=request.stop_reason(token))
        return self._finish(row, "stop" if token == PENDING else "length")

    def _finish(
        self, row: int, reason: Reason, stop: int | None = None, error: Exception | None = None
    ) -> Finish:
        entry = self._running[row]
        self._release(row)
        del self._entries[entry.request.id]
        return Finish(entry.request.id, reason, stop, error)

    def _release(self, row: int) -> np.ndarray:
        """Take row and blocks back; the tokens it had."""
        del self._running[row]
        self._prefilling.discard(row)
        self._order = None
        self._generation += 1
        self._released.append(row)
        self.sharing.release(row)
        self.cache.release(row)
        return self.table.release(row)


def _row_start(entry: Entry) -> RowStart:
    request = entry.request
    if entry.row is None:
        raise EngineError(f"request {request.id!r} is admitted without a row or a grammar")
    return RowStart(
        row=entry.row,
        request=request.id,
        params=request.params,
        prompt=request.prompt,
        output=entry.history[request.prompt_len :],
        seed=request.seed,
        stop_ids=request.stop_ids(),
        bad_words=request.bad_words,
        adapter=request.adapter,
        media=request.media,
        positions=request.positions,
        position_offset=request.position_offset,
        embeds=request.embeds,
    )
