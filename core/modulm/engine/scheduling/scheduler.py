"""Scheduler: one token budget per step, shared by every sequence that has tokens to catch up on.

There are no separate prefill and decode phases: a row has `length` tokens, of which `computed` have
been through the model, and each step computes more of them. Running rows come first, then waiting
requests in the policy's order. When blocks run out, the policy selects a row to preempt; it is
recomputed later with the same result.

Planning is optimistic: it counts the step's tokens as computed and appends a placeholder for the
token that each row will sample, which `commit` fills in. So the next step can be planned while one
runs. Results for rows that ended or were preempted in the meantime are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from modulm.contracts.executor import PENDING, Capacity, Plan, RowStart, StepResult
from modulm.contracts.policy import Policy, Scheduler
from modulm.contracts.requests import Finish, Reason, Request, Start, StepEvents, StepStats
from modulm.contracts.step_part import PartPlanner, PlannerContext, StepPart
from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.scheduling.admission import Admission
from modulm.engine.scheduling.draft_counts import DraftCounts, draft_counts, draft_statistics
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.planner_hooks import PlannerHooks
from modulm.engine.scheduling.prefix_reuse import PrefixReuse
from modulm.engine.scheduling.request_queue import Entry, RequestQueue
from modulm.engine.scheduling.row_table import RowTable
from modulm.engine.scheduling.step import (
    NextStep,
    StepInFlight,
    logprobs_by_request,
    row_error,
    row_start,
)
from modulm.engine.scheduling.token_runs import TokenRuns
from modulm.errors import EngineError, RequestError, RowError

__all__ = ["BudgetScheduler"]

#: How many waiting requests a step may skip, in addition to one per row.
_LOOK = 8


class BudgetScheduler(Scheduler):
    """The built-in scheduler. Not thread-safe.

    parts: the engine's step parts, whose planners it calls.
    """

    def __init__(
        self, limits: Limits, capacity: Capacity, policy: Policy, parts: Sequence[StepPart] = ()
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.table = RowTable(limits.rows, capacity.max_model_len)
        self.cache = KVCacheManager(capacity, limits.rows)
        self.prefix_reuse = PrefixReuse(self.cache, self.table, limits.hash, limits.prefixes)
        self.planners: dict[str, PartPlanner] = {}
        for part in parts:
            if (planner := part.planner(self._context(part.name, capacity))) is not None:
                self.planners[part.name] = planner
        if (planner := policy.planner(self._context("", capacity))) is not None:
            self.planners[policy.name] = planner
        self._hooks = PlannerHooks(self.planners)
        #: Whether the policy may limit or preempt running rows in favor of waiting requests.
        self._shares = planner is not None
        queue: Any = policy.queue()
        self.queue = RequestQueue(policy) if queue is None else queue
        self._max_len = min(capacity.max_model_len, self.cache.most(limits.tokens))
        if not (limits.chunked or capacity.groups):
            self._max_len = min(self._max_len, limits.tokens)
        self._entries: dict[str, Entry] = {}
        self._running: dict[int, Entry] = {}
        self._prefilling: set[int] = set()
        self._in_flight: deque[StepInFlight] = deque()
        self._released: list[int] = []
        #: Rows waiting for a load; workers learn of them with the first step that runs them.
        self._unannounced: set[int] = set()
        self._arrivals = self._steps = self._preempted = self._deferred = 0
        #: Whether the next waiting request found too few blocks.
        self._blocked = False
        # Counts releases. While it is unchanged, every planned row is still the same sequence.
        self._generation = 0
        # Whether a sampling row must wait for its token before it is planned again.
        self._one_by_one = limits.stages > 1 or any(
            planner.one_at_a_time for planner in self.planners.values()
        )
        self._order: np.ndarray | None = None
        self._order32 = np.zeros(0, dtype=np.int32)
        self._ones = np.ones(limits.rows, dtype=np.int64)
        self._ones32 = np.ones(limits.rows, dtype=np.int32)
        self._true = np.ones(limits.rows, dtype=np.bool_)

    def _context(self, part: str, capacity: Capacity) -> PlannerContext:
        return PlannerContext(
            rows=self.table,
            cache=self.cache,
            prefixes=self.prefix_reuse,
            limits=self.limits,
            capacity=capacity,
            values=capacity.parts.get(part, {}),
        )

    @property
    def busy(self) -> bool:
        return bool(self._entries or self._in_flight) or any(
            planner.busy for planner in self.planners.values()
        )

    @property
    def max_len(self) -> int:
        return self._max_len

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    # Requests.

    def check_room(self, requests: int, tokens: int) -> None:
        self.check_room_of("", requests, tokens)

    def check_room_of(self, tenant: str, requests: int, tokens: int) -> None:
        self.limits.check_room(self.queue.load(tenant), (requests, tokens), self.table.free)

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, or RequestError if it can never run."""
        if request.id in self._entries:
            raise RequestError(f"request id {request.id!r} is in use", "request_id")
        limit = request.limit(self._max_len)
        if not request.prompt_len:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.prompt_len > self._max_len or limit <= request.prompt_len:
            raise RequestError(
                f"the prompt has {request.prompt_len} tokens; the limit with the answer is "
                    f"{self._max_len}", "prompt",
            )  # fmt: skip
        if not self.limits.chunked and request.prompt_len > self.limits.tokens:
            raise RequestError(
                f"the prompt has {request.prompt_len} tokens, one step has at most "
                f"{self.limits.tokens}, and prompts are not split over steps "
                "(enable_chunked_prefill)", "prompt",
            )  # fmt: skip
        for check in self._hooks.check:
            check(request)
        self.cache.check_crossed(request.crossed)
        self.check_room_of(request.tenant, 1, request.prompt_len)
        entry = Entry(request, self._arrivals, limit)
        self._arrivals += 1
        self._entries[request.id] = entry
        self.queue.push(entry)

    def abort(self, request: str) -> Finish | None:
        """End a request and free its blocks; None for an unknown id."""
        entry = self._entries.get(request)
        if entry is None:
            return None
        if entry.row is not None:
            return self._finish(entry.row, "abort")
        self.queue.remove(entry)
        for finished in self._hooks.finished:
            finished(request)
        del self._entries[request]
        return Finish(request, "abort")

    def gauges(self) -> StepStats:
        return StepStats(self._steps, len(self._running), len(self.queue), self.cache.usage)

    def forget_prefixes(self, root: bytes | None = None) -> None:
        self.prefix_reuse.forget(root)
        for forget in self._hooks.forget:
            forget(not self._running)

    # Planning a step.

    def plan(self) -> Plan:
        """Plan the next step; it is idle if there is nothing to do."""
        began = time.perf_counter()
        if self._shares and (self._blocked or not self.table.free):
            self._blocked = False
            if (entry := self.queue.peek()) is not None:
                self._preempt(entry.request)
        preempted = self._preempted
        step = self._continue()
        if len(self.queue) and self.table.free and self._preempted == preempted:
            step = self._join(step)
        if self._unannounced:
            self._announce(step)
        step.number = self._steps
        left = self.limits.tokens - int(step.counts.sum()) if self._hooks.plan else 0
        for name, plan in self._hooks.plan:
            value = plan(step, left)
            if value is not None:
                step.parts[name] = value
        return self._assemble(step, began)

    def _continue(self) -> NextStep:
        """Plan the running rows, preempting some until the others have their blocks."""
        while True:
            step = self._share()
            if not len(step.rows) or self.cache.grow(step.rows, step.starts + step.counts):
                return step
            self._preempt()

    def _share(self) -> NextStep:
        """Divide the budget among running rows in order of admission."""
        table, rows = self.table, self._ordered()
        starts = table.computed[rows]
        lengths = table.length[rows]
        # A row whose last token is already being sampled has nothing left to compute.
        open_ends = lengths < table.limit[rows]
        if self._one_by_one or table.paused:
            open_ends &= ~table.waiting[rows]
            # Each pipeline stage works on its share of the rows.
            open_ends &= open_ends.cumsum() <= -(-len(rows) // self.limits.stages)
        if self._hooks.begin:
            decoding = int(np.count_nonzero(open_ends)) > len(self._prefilling)
            for begin in self._hooks.begin:
                begin(decoding)
        contended = len(rows) > self.limits.tokens or (self._shares and len(self.queue))
        # For few rows, `all` and `any` cost four times what counting does.
        if not (self._prefilling or contended) and np.count_nonzero(open_ends) == len(rows):
            return NextStep(rows, starts, self._ones[: len(rows)], one_each=True)
        wants = np.where(open_ends, lengths - starts, 0)
        if self.limits.long:
            np.minimum(wants, self.limits.long, out=wants)
        for claim in self._hooks.claim:
            claim(rows, starts, wants)
        before = np.cumsum(wants) - wants
        counts = self._cut(starts, np.clip(self.limits.tokens - before, 0, wants), lengths)
        if not self.limits.chunked:
            counts = np.where(counts < wants, 0, counts)
        for cut in self._hooks.cut:
            cut(rows, starts, counts)
        chosen = counts > 0
        if not chosen.all():
            rows, starts, counts = rows[chosen], starts[chosen], counts[chosen]
        return NextStep(rows, starts, counts, one_each=not self._prefilling)

    def _cut(self, starts: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Shorten chunks of unfinished prompts to end at a multiple of the cache's unit."""
        ends = starts + counts
        aligned = np.maximum(ends - ends % self.cache.unit, starts)
        unfinished = ends < lengths
        if not self._patient():
            unfinished &= aligned > starts
        cut: np.ndarray = np.where(unfinished, aligned - starts, counts)
        return cut

    def _patient(self) -> bool:
        """Whether a prompt waits if less than a unit fits, since its state could not be cached.

        Only if decoding rows leave room for a whole unit per step, so that a prompt can proceed.
        """
        decoding = len(self._running) - len(self._prefilling)
        room = min(self.limits.tokens - decoding, self.limits.long or self.limits.tokens)
        return 1 < self.cache.unit <= room

    def _ordered(self) -> np.ndarray:
        """Return running rows in order of admission; the same array until one starts or ends."""
        if self._order is None:
            self._order = np.fromiter(self._running, dtype=np.int64, count=len(self._running))
            self._order32 = self._order.astype(np.int32)
        return self._order

    def _preempt(self, waiting: Request | None = None) -> None:
        """Release the blocks of the policy's victim and queue it again with its tokens.

        waiting: the request to make room for, if the policy agrees; None: running rows need blocks.
        """
        entries = list(self._running.values())
        running = [entry.request for entry in entries]
        policy = self.policy
        index = policy.displaced(waiting, running) if waiting else policy.victim(running)
        if index is None:
            return
        entry = entries[index]
        if entry.row is None:
            raise EngineError(f"running request {entry.request.id!r} has no row")
        entry.history = self._release(entry.row)
        entry.row = None
        entry.preemptions += 1
        self._preempted += 1
        self.queue.push(entry)

    def _join(self, step: NextStep) -> NextStep:
        """Admit waiting requests into the rest of the budget."""
        unfinished = [self._running[row].tokens for row in self._prefilling]
        left = self.limits.tokens - int(step.counts.sum())
        admission = Admission(self.limits, left, unfinished, self.cache.unit, self._patient())
        joined: list[tuple[Entry, Hit, int]] = []
        skipped: list[Entry] = []
        self._deferred = 0
        while admission.left > 0 and self.table.free and len(skipped) < self.limits.rows + _LOOK:
            entry = self.queue.peek()
            if entry is None:
                break
            prefix = self._find_prefix(entry, skipped)
            if prefix is None:
                self._deferred += 1
                skipped.append(self.queue.pop())
                continue
            hit, reach = prefix
            if reach > hit.tokens:
                if not self._admit(entry, hit, reach - hit.tokens):
                    break
                self.queue.pop()
                self._load(entry, hit, reach)
                continue
            missing = entry.tokens - hit.tokens
            count = admission.portion(entry, missing)
            if count == 0:
                skipped.append(self.queue.pop())
                continue
            for limit in self._hooks.limit:
                count = count and limit(entry.request, hit.tokens, count)
            waits = self._hooks.waits_in_row if not count and len(step.rows) else ()
            may_wait = any(wait(entry.request) for wait in waits)
            if count is None or not (count or may_wait) or not self._admit(entry, hit, count):
                break
            for note in self._hooks.joined:
                note(entry.request, entry.row, hit.tokens, count)
            self.queue.pop()
            admission.take(entry, count, missing)
            joined.append((entry, hit, count))
        for entry in skipped:
            self.queue.push(entry)
        return step.extended(joined, self._row_start) if joined else step

    def _find_prefix(self, entry: Entry, skipped: list[Entry]) -> tuple[Hit, int] | None:
        """Find the entry's prefix on the device, and its length including external storage.

        None: the entry has to wait. skipped: entries ahead of it that wait.
        """
        if any(defers(entry, skipped) for defers in self._hooks.defers):
            return None
        hit = self.prefix_reuse.lookup(entry)
        if hit is None:
            return None
        reach = hit.tokens
        for external in self._hooks.external:
            tokens = external(entry, hit.tokens)
            if tokens is None:
                return None
            reach = max(reach, tokens)
        return hit, reach

    def _load(self, entry: Entry, hit: Hit, reach: int) -> None:
        """Load the blocks up to `reach` of an entry, which waits in its row meanwhile."""
        if entry.row is not None:
            self._prefilling.add(entry.row)
            self._unannounced.add(entry.row)
            for load in self._hooks.load:
                load(entry, entry.row, hit.tokens, reach)

    def _announce(self, step: NextStep) -> None:
        """Admit rows whose load has ended with the first step that runs them."""
        rows, now = self._unannounced.intersection(step.rows.tolist()), time.monotonic()
        self._unannounced -= rows
        for loaded in self._hooks.loaded:
            for row, cached in loaded(sorted(rows)).items():
                entry = self._running[row]
                step.admit = (*step.admit, self._row_start(entry))
                if not entry.preemptions:
                    step.started.append(Start(entry.request.id, cached, now))

    def _row_start(self, entry: Entry) -> RowStart:
        parts = {
            name: value
            for name, row_value in self._hooks.row_value
            if (value := row_value(entry.request)) is not None
        }
        return row_start(entry, parts)

    def _admit(self, entry: Entry, hit: Hit, count: int) -> bool:
        """Assign a row and blocks to an entry; False if too few blocks are free."""
        known = entry.tokens if self.limits.reserve else hit.tokens + count
        spare = self.limits.spare if self._running else 0.0
        row = self.table.next_row
        if not self.cache.admit(row, hit, known, hit.tokens + count, spare, entry.request.crossed):
            self._blocked = True
            return False
        self.table.admit(entry.request, entry.history, hit.tokens, entry.limit)
        self.prefix_reuse.admit(entry, row, hit)
        for admit in self._hooks.admit:
            admit(entry, row)
        entry.row = row
        self._running[row] = entry
        self._order = None
        if hit.tokens + count < entry.tokens:
            self._prefilling.add(row)
        return True

    def _assemble(self, step: NextStep, began: float) -> Plan:
        """Build the plan and advance the row table as if it had run."""
        table, rows, counts = self.table, step.rows, step.counts
        ends = step.starts + counts
        if step.one_each:
            samples, sampled, places = self._true[: len(rows)], rows, ends
            tokens = table.tokens[rows, step.starts].astype(np.int64)
        else:
            samples = ends == table.length[rows]
            sampled, places = rows[samples], ends[samples]
            if step.drafted is not None:
                counts = counts + step.drafted
            tokens = table.gather(rows, step.starts, counts)
            self._prefilling.difference_update(sampled.tolist())
            for past_prompt in self._hooks.sampled:
                past_prompt(sampled)
        if self._one_by_one:
            table.waiting[sampled] = True
        table.computed[rows] = ends
        table.tokens[sampled, places] = PENDING
        table.length[sampled] = places + 1
        plan = Plan(
            step=self._steps,
            rows=self._order32 if rows is self._order else rows.astype(np.int32),
            starts=step.starts.astype(np.int32),
            counts=self._ones32[: len(rows)] if step.one_each else counts.astype(np.int32),
            tokens=tokens,
            tables=self.cache.tables(rows),
            samples=samples,
            admit=step.admit,
            release=tuple(self._released),
            drafted=None if step.drafted is None else step.drafted.astype(np.int32),
            state_slots=step.state_slots,
            parts=step.parts,
        )
        if not plan.idle:
            self._steps += 1
            self._released.clear()
            flight = StepInFlight(plan, rows, ends, sampled, places, epochs=table.epoch[rows])
            flight.generation, flight.started = self._generation, step.started
            flight.seconds = time.perf_counter() - began
            self._in_flight.append(flight)
        return plan

    # Results.

    def commit(self, plan: Plan, result: StepResult) -> StepEvents:
        """Process the result of the oldest plan in flight."""
        flight = self._take_in_flight(plan)
        table = self.table
        for report in result.parts:
            if report.part in self.planners:
                self.planners[report.part].receive(plan, report)
        failed = self._fail_rows(flight, result) if result.errors else []
        runs = TokenRuns.of(flight, result)
        if flight.generation != self._generation:
            alive = np.zeros(table.rows, dtype=np.bool_)
            alive[flight.rows] = table.epoch[flight.rows] == flight.epochs
            runs.keep(alive)
        lengths = runs.places + 1
        stopped = table.stopped(runs.owners, runs.tokens, lengths)
        ended = stopped | (lengths >= table.limit[runs.owners])
        if plan.drafted is not None and ended.any():
            left = runs.cut(ended.nonzero()[0].tolist())
            stopped, ended = stopped[left], ended[left]
        table.tokens[runs.owners, runs.places] = runs.tokens
        if self._one_by_one:
            self._settle(plan, runs, result.unfinished)
        self.prefix_reuse.advance(runs.rows, runs.ends)
        for settle in self._hooks.settle:
            settle(runs.rows, runs.ends, runs.owners)
        self.cache.trim(runs.rows, runs.ends)
        names, ids = table.names[runs.owners].tolist(), runs.tokens.tolist()
        drafted = draft_counts(flight, result, table)
        extras: dict[str, Any] = {}
        if result.logprobs or result.prompt_logprobs or self._hooks.events:
            rows = {row: table.names[row] for row in runs.rows.tolist()}
            extras = logprobs_by_request(result, flight, rows, names)
            for events in self._hooks.events:
                extras |= {key: extras.get(key, {}) | value for key, value in events(rows).items()}
        finished = [
            self._end(int(runs.owners[i]), ids[i], bool(stopped[i]))
            for i in ended.nonzero()[0].tolist()
        ]
        if result.accepted is not None and not result.accepted.all():
            finished += self._end_silent(runs, result.unfinished)
        return StepEvents(
            requests=names,
            tokens=ids,
            started=flight.started,
            finished=failed + finished,
            stats=self._stats(flight, result, len(ids), drafted),
            drafted=drafted,
            **extras,
        )

    def _settle(self, plan: Plan, runs: TokenRuns, unfinished: Sequence[int]) -> None:
        """Set rows to the end of their runs so that they may be planned again.

        Unfinished rows return to their state before the step.
        """
        table = self.table
        table.length[runs.owners] = runs.places + 1
        table.computed[runs.owners] = runs.places
        self.cache.settle(runs.rows, runs.ends)
        table.waiting[runs.sampled] = False
        if unfinished:
            rows, starts = runs.unfinished(plan, unfinished)
            table.length[rows] -= 1
            table.computed[rows] = starts
            self._prefilling.update(rows[table.length[rows] - starts > 1].tolist())

    def _end_silent(self, runs: TokenRuns, unfinished: Sequence[int]) -> list[Finish]:
        """End the rows that got no token, unless they are unfinished."""
        finished = []
        for row in runs.silent():
            if any(ends(row) for ends in self._hooks.ends):
                finished.append(self._finish(row, "stop"))
            elif row not in unfinished:
                error = RowError("the executor returned no token")
                finished.append(self._finish(row, "error", error=error))
        return finished

    def fail(self, plan: Plan, error: Exception) -> list[Finish]:
        """End the requests of a step that raised, since their caches may be incomplete."""
        flight = self._take_in_flight(plan)
        for fail in self._hooks.fail:
            fail(plan)
        alive = self.table.epoch[flight.rows] == flight.epochs
        return [self._finish(row, "error", error=error) for row in flight.rows[alive].tolist()]

    def _take_in_flight(self, plan: Plan) -> StepInFlight:
        flight = self._in_flight.popleft()
        if flight.plan is not plan:
            raise EngineError(f"step {plan.step} was committed before step {flight.plan.step}")
        return flight

    def _fail_rows(self, flight: StepInFlight, result: StepResult) -> list[Finish]:
        """End the rows that failed. Executors repeat a row's error until it is released."""
        epochs = dict(zip(flight.rows.tolist(), flight.epochs.tolist(), strict=True))
        return [
            self._finish(row, "error", error=row_error(failure))
            for row, failure in result.errors.items()
            if epochs.get(row) == int(self.table.epoch[row])
        ]

    def _stats(
        self, flight: StepInFlight, result: StepResult, generated: int, drafted: DraftCounts
    ) -> StepStats:
        queried, hits = self.prefix_reuse.take_counts()
        preempted, self._preempted = self._preempted, 0
        return StepStats(
            step=self._steps,
            running=len(self._running),
            waiting=len(self.queue),
            deferred=min(self._deferred, len(self.queue)),
            usage=self.cache.usage,
            computed=len(flight.plan.tokens),
            generated=generated,
            preempted=preempted,
            queried=queried,
            hit=hits,
            plan_seconds=flight.seconds,
            run_seconds=result.seconds,
            routed=() if result.routed is None else tuple(result.routed.tolist()),
            **draft_statistics(drafted),
        )

    def _end(self, row: int, token: int, stopped: bool) -> Finish:
        stop = self._running[row].request.stop_reason(token) if stopped else None
        return self._finish(row, "stop" if stopped else "length", stop)

    def _finish(
        self, row: int, reason: Reason, stop: int | None = None, error: Exception | None = None
    ) -> Finish:
        entry = self._running[row]
        self._release(row)
        for finished in self._hooks.finished:
            finished(entry.request.id)
        del self._entries[entry.request.id]
        return Finish(entry.request.id, reason, stop, error, entry.preemptions)

    def _release(self, row: int) -> np.ndarray:
        """Free a row and its blocks; return its tokens."""
        entry = self._running.pop(row)
        self._prefilling.discard(row)
        self._order = None
        self._generation += 1
        if row in self._unannounced:
            self._unannounced.discard(row)
        else:
            self._released.append(row)
        for release in self._hooks.release:
            release(entry.request, row)
        self.prefix_reuse.release(row)
        self.cache.release(row)
        return self.table.release(row)
