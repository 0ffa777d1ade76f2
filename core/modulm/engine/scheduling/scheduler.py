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
from collections import Counter, deque
from typing import Any

import numpy as np

from modulm.contracts.connector import KVIndex
from modulm.contracts.executor import PENDING, Capacity, Plan, StepResult
from modulm.contracts.policy import Policy, Scheduler
from modulm.contracts.requests import Finish, Reason, Request, Start, StepEvents, StepStats
from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.scheduling.adapter_slots import AdapterSlots
from modulm.engine.scheduling.admission import Admission
from modulm.engine.scheduling.drafting import Drafting, Verified, drafting_figures, verified
from modulm.engine.scheduling.encoder_budget import EncoderBudget
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.prefix_reuse import PrefixReuse
from modulm.engine.scheduling.request_queue import Entry, RequestQueue
from modulm.engine.scheduling.row_table import RowTable
from modulm.engine.scheduling.step import NextStep, StepInFlight, row_start
from modulm.engine.scheduling.token_runs import TokenRuns
from modulm.engine.scheduling.transfers import KVTransfers
from modulm.errors import EngineError, QueueFull, RequestError, RowError

__all__ = ["BudgetScheduler"]

#: Waiting requests that are passed over in a step, beside one for each row.
_LOOK = 8


class BudgetScheduler(Scheduler):
    """The built-in scheduler. Not safe for use by several threads."""

    def __init__(
        self, limits: Limits, capacity: Capacity, policy: Policy, index: KVIndex | None = None
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.table = RowTable(limits.rows, capacity.max_model_len)
        self.cache = KVCacheManager(capacity, limits.rows)
        self.prefix_reuse = PrefixReuse(self.cache, self.table, limits.hash, limits.prefixes)
        self.drafting = Drafting(capacity, self.table, self.cache)
        self.transfers = KVTransfers(index, self.cache, self.table, self.prefix_reuse)
        self.adapters = AdapterSlots(capacity.adapters)
        self.encoders = EncoderBudget(capacity, limits, self.cache.unit)
        self.queue = RequestQueue(policy)
        self._max_len = min(capacity.max_model_len, self.cache.most(limits.tokens))
        if not (limits.chunked or capacity.groups):
            self._max_len = min(self._max_len, limits.tokens)
        self._entries: dict[str, Entry] = {}
        self._running: dict[int, Entry] = {}
        self._prefilling: set[int] = set()
        self._in_flight: deque[StepInFlight] = deque()
        self._released: list[int] = []
        self._arrivals = self._steps = self._preempted = 0
        # Counts releases: while it stands still, every planned row is still the same sequence.
        self._generation = 0
        # Whether a row that samples waits for its token before it is planned again.
        self._one_by_one = self.drafting.most > 0 or limits.stages > 1
        self._order: np.ndarray | None = None
        self._order32 = np.zeros(0, dtype=np.int32)
        self._ones = np.ones(limits.rows, dtype=np.int64)
        self._ones32 = np.ones(limits.rows, dtype=np.int32)
        self._true = np.ones(limits.rows, dtype=np.bool_)

    @property
    def busy(self) -> bool:
        return bool(self._entries or self._in_flight or self.transfers.busy)

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
        if request.adapter is not None and not self.adapters.most:
            raise RequestError("the engine runs without adapters", "model")
        if request.media:
            self.encoders.check(request)
        self.cache.check_crossed(request.crossed)
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
        self.transfers.finished(request)
        del self._entries[request]
        return Finish(request, "abort")

    def gauges(self) -> StepStats:
        return StepStats(self._steps, len(self._running), len(self.queue), self.cache.usage)

    def forget_prefixes(self) -> None:
        self.prefix_reuse.forget()
        self.adapters.forget()
        if not self._running:
            self.encoders.fail()

    # A step is planned.

    def plan(self) -> Plan:
        """The next step; idle when there is nothing to do."""
        began = time.perf_counter()
        preempted = self._preempted
        step = self._continue()
        if len(self.queue) and self.table.free and self._preempted == preempted:
            step = self._join(step)
        if self.transfers.loaded:
            self._announce(step)
        if self.drafting.most and len(step.rows):
            self.drafting.add(step, self.limits.tokens - int(step.counts.sum()))
        if self.encoders.enabled and len(step.rows):
            step.encode, step.encode_rows, step.drop_media = self.encoders.plan(self._steps)
        if self.adapters.most:
            step.adapters = self.adapters.given()
        if self.transfers.index is not None:
            step.transfers = self.transfers.plan(len(step.rows))
        return self._assemble(step, began)

    def _continue(self) -> NextStep:
        """The running rows' part; rows are preempted until the others have their blocks."""
        while True:
            step = self._share()
            if not len(step.rows) or self.cache.grow(step.rows, step.starts + step.counts):
                return step
            self._preempt()

    def _share(self) -> NextStep:
        """Divide the budget among running rows in their order of admission."""
        table, rows = self.table, self._ordered()
        starts = table.computed[rows]
        known = table.known[rows]
        # A row whose last token is being sampled already has nothing left to compute.
        open_ends = known < table.limit[rows]
        if self._one_by_one or self.transfers.loading:
            open_ends &= ~table.waiting[rows]
            # Each stage has its part of the rows.
            open_ends &= open_ends.cumsum() <= -(-len(rows) // self.limits.stages)
        if self.encoders.enabled:
            decoding = int(np.count_nonzero(open_ends)) > len(self._prefilling)
            self.encoders.begin(table.computed, decoding)
        if not self._prefilling and len(rows) <= self.limits.tokens and open_ends.all():
            return NextStep(rows, starts, self._ones[: len(rows)], one_each=True)
        wants = np.where(open_ends, known - starts, 0)
        if self.limits.long:
            np.minimum(wants, self.limits.long, out=wants)
        if self.encoders.rows and self.encoders.in_pieces:
            # What waits for a last piece leaves its part of the budget to others.
            self._encode(rows, starts, wants)
        before = np.cumsum(wants) - wants
        counts = self._cut(starts, np.clip(self.limits.tokens - before, 0, wants), known)
        if not self.limits.chunked:
            counts = np.where(counts < wants, 0, counts)
        if self.encoders.rows:
            self._encode(rows, starts, counts)
        chosen = counts > 0
        if not chosen.all():
            rows, starts, counts = rows[chosen], starts[chosen], counts[chosen]
        return NextStep(rows, starts, counts, one_each=not self._prefilling)

    def _encode(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Cut the counts before media that cannot be encoded in this step."""
        for place in np.isin(rows, list(self.encoders.rows)).nonzero()[0].tolist():
            row, start, count = int(rows[place]), int(starts[place]), int(counts[place])
            fitting, picks = self.encoders.fit(self.encoders.rows[row], start, count)
            counts[place] = fitting
            self.encoders.pick(row, start, fitting, picks)

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

    def _join(self, step: NextStep) -> NextStep:
        """Admit waiting requests into what is left of the budget."""
        unfinished = [self._running[row].tokens for row in self._prefilling]
        left = self.limits.tokens - int(step.counts.sum())
        admission = Admission(self.limits, left, unfinished, self.cache.unit, self._patient())
        joined: list[tuple[Entry, Hit, int]] = []
        skipped: list[Entry] = []
        while admission.left > 0 and self.table.free and len(skipped) < self.limits.rows + _LOOK:
            entry = self.queue.peek()
            if entry is None:
                break
            found = self._found(entry, skipped)
            missing = 0 if found is None else entry.tokens - found[0].tokens
            load = found is not None and found[1] > found[0].tokens
            count = missing if load or found is None else admission.portion(entry, missing)
            if found is None or count == 0:
                skipped.append(self.queue.pop())
                continue
            hit, reach = found
            media = entry.request.media
            picks: list[int] = []
            if load:
                count = reach - hit.tokens
            elif media and count:
                fitting, picks = self.encoders.fit(media, hit.tokens, count)
                count = fitting if self.limits.chunked or fitting == count else 0
            # Rows that wait for media do so in a place of their own, and let others pass.
            waits = bool(media) and self.encoders.in_pieces and len(step.rows) > 0
            if count is None or not (count or waits) or not self._admit(entry, hit, count):
                break
            if media and not load and entry.row is not None:
                self.encoders.pick(entry.row, hit.tokens, count, picks)
            self.queue.pop()
            if load:
                self._load(entry, hit, reach)
                continue
            admission.take(entry, count, missing)
            joined.append((entry, hit, count))
        for entry in skipped:
            self.queue.push(entry)
        return self._extended(step, joined) if joined else step

    def _found(self, entry: Entry, skipped: list[Entry]) -> tuple[Hit, int] | None:
        """What of the entry's tokens the device holds, and how many are held anywhere; None: it
        has to wait. skipped: entries before it that wait.
        """
        if entry.request.adapter is not None and not self._has_slot(entry, skipped):
            return None
        hit = self.prefix_reuse.lookup(entry)
        reach = None if hit is None else self.transfers.matched(entry, hit)
        return None if hit is None or reach is None else (hit, reach)

    def _has_slot(self, entry: Entry, skipped: list[Entry]) -> bool:
        """Whether the entry's adapter can be used now.

        Those before it that find no slot let a number of others pass, and then no more.
        """
        fits = self.adapters.fits
        before = [other for other in skipped if not fits(other.request.adapter)]
        if not fits(entry.request.adapter) or any(e.passed >= self.limits.rows for e in before):
            return False
        for other in before:
            other.passed += 1
        return True

    def _load(self, entry: Entry, hit: Hit, reach: int) -> None:
        """The entry, which has a row, waits in it until its blocks up to `reach` are loaded."""
        if entry.row is not None:
            self._prefilling.add(entry.row)
            self.transfers.load(entry, entry.row, hit, reach)

    def _announce(self, step: NextStep) -> None:
        """Rows whose load has ended are admitted with the first step that runs them."""
        loaded, now = self.transfers.loaded, time.monotonic()
        for row in step.rows.tolist():
            if row in loaded:
                entry, cached = self._running[row], loaded.pop(row)
                step.admit = (*step.admit, row_start(entry))
                if not entry.preemptions:
                    step.started.append(Start(entry.request.id, cached, now))

    def _admit(self, entry: Entry, hit: Hit, count: int) -> bool:
        """Give the entry a row and blocks; False if there are too few blocks."""
        known = entry.tokens if self.limits.reserve else hit.tokens + count
        spare = self.limits.spare if self._running else 0.0
        row = self.table.next_row
        if not self.cache.admit(row, hit, known, hit.tokens + count, spare, entry.request.crossed):
            return False
        self.table.admit(entry.request, entry.history, hit.tokens, entry.limit)
        self.prefix_reuse.admit(entry, row, hit)
        self.adapters.take(entry.request.adapter)
        self.transfers.admit(entry, row)
        if entry.request.media:
            self.encoders.admit(row, entry.request.media)
        entry.row = row
        self._running[row] = entry
        self._order = None
        if hit.tokens + count < entry.tokens:
            self._prefilling.add(row)
        return True

    def _extended(self, step: NextStep, joined: list[tuple[Entry, Hit, int]]) -> NextStep:
        """The step with the rows that were just admitted."""
        now = time.monotonic()
        run = [both for both in joined if both[2]]
        rows = [entry.row for entry, _, _ in run]
        return NextStep(
            np.concatenate([step.rows, rows]).astype(np.int64),
            np.concatenate([step.starts, [hit.tokens for _, hit, _ in run]]).astype(np.int64),
            np.concatenate([step.counts, [count for _, _, count in run]]).astype(np.int64),
            admit=tuple(row_start(entry) for entry, _, _ in joined),
            started=[
                Start(entry.request.id, hit.tokens, now)
                for entry, hit, _ in joined
                if not entry.preemptions
            ],
        )

    def _assemble(self, step: NextStep, began: float) -> Plan:
        """Make the plan and advance the table as if it had run."""
        table, rows, counts = self.table, step.rows, step.counts
        ends = step.starts + counts
        if step.one_each:
            samples, sampled, places = self._true[: len(rows)], rows, ends
            tokens = table.tokens[rows, step.starts].astype(np.int64)
        else:
            samples = ends == table.known[rows]
            sampled, places = rows[samples], ends[samples]
            if step.drafted is not None:
                counts = counts + step.drafted
            tokens = table.gather(rows, step.starts, counts)
            self._prefilling.difference_update(sampled.tolist())
            if self.encoders.rows:
                for row in sampled.tolist():
                    self.encoders.release(row)
        if self._one_by_one:
            table.waiting[sampled] = True
        table.computed[rows] = ends
        table.tokens[sampled, places] = PENDING
        table.known[sampled] = places + 1
        plan = Plan(
            self._steps,
            self._order32 if rows is self._order else rows.astype(np.int32),
            step.starts.astype(np.int32),
            self._ones32[: len(rows)] if step.one_each else counts.astype(np.int32),
            tokens,
            self.cache.tables(rows),
            samples,
            step.admit,
            tuple(self._released),
            None if step.drafted is None else step.drafted.astype(np.int32),
            step.state_slots,
            step.encode,
            step.drop_media,
            step.adapters,
            step.transfers,
            step.encode_rows,
        )
        if not plan.idle:
            self._steps += 1
            self._released.clear()
            self._in_flight.append(StepInFlight(
                plan, rows, ends, sampled, places, table.epoch[rows], self._generation,
                step.started, time.perf_counter() - began,
            ))  # fmt: skip
        return plan

    # A step's result comes in.

    def commit(self, plan: Plan, result: StepResult) -> StepEvents:
        """Take the result of the oldest plan that has none yet."""
        flight = self._take_in_flight(plan)
        table = self.table
        if result.encoded:
            self.encoders.finished(plan.step, result.encoded)
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
            self._settle(runs, result)
        if result.transfers is not None:
            self.transfers.end(result.transfers)
        self.prefix_reuse.advance(runs.rows, runs.ends)
        if self.transfers.index is not None:
            self.transfers.save(runs.rows, runs.ends)
        self.cache.trim(runs.rows, runs.ends)
        names, ids = table.names[runs.owners].tolist(), runs.tokens.tolist()
        extras: dict[str, Any] = {"drafted": verified(flight, result, table)}
        if result.logprobs or result.prompt_logprobs or result.pooled:
            extras |= self._extras(result, flight, runs, names)
        finished = [
            self._end(int(runs.owners[i]), ids[i], bool(stopped[i]))
            for i in ended.nonzero()[0].tolist()
        ]
        if result.accepted is not None and not result.accepted.all():
            finished += self._end_silent(runs, result)
        return StepEvents(
            requests=names,
            tokens=ids,
            started=flight.started,
            finished=failed + finished,
            stats=self._stats(flight, result, len(ids), extras["drafted"]),
            **extras,
        )

    def _settle(self, runs: TokenRuns, result: StepResult) -> None:
        """Rows stand where their runs end, and may be planned again."""
        table = self.table
        table.known[runs.owners] = runs.places + 1
        table.computed[runs.owners] = runs.places
        self.cache.settle(runs.rows, runs.ends)
        table.waiting[runs.sampled] = False
        self.drafting.propose(result.drafts, runs.owners)

    def _end_silent(self, runs: TokenRuns, result: StepResult) -> list[Finish]:
        """End the rows that gave no token: those that were pooled."""
        finished = []
        for row in runs.silent():
            lost = None if row in result.pooled else RowError("the executor gave no token")
            finished.append(self._finish(row, "error" if lost else "stop", error=lost))
        return finished

    def fail(self, plan: Plan, error: Exception) -> list[Finish]:
        """The step raised: what it ran ends with `error`, as its memory is in doubt."""
        flight = self._take_in_flight(plan)
        self.transfers.fail(plan)
        self.adapters.lost(plan.adapters)
        self.encoders.fail()
        alive = self.table.epoch[flight.rows] == flight.epochs
        rows = flight.rows[alive].tolist()
        return [self._finish(row, "error", error=error) for row in rows]

    def _take_in_flight(self, plan: Plan) -> StepInFlight:
        flight = self._in_flight.popleft()
        if flight.plan is not plan:
            raise EngineError(f"step {plan.step} came in before step {flight.plan.step}")
        return flight

    def _fail_rows(self, flight: StepInFlight, result: StepResult) -> list[Finish]:
        """End the rows that failed; an executor repeats errors until a row is released."""
        refused = result.refused
        epochs = dict(zip(flight.rows.tolist(), flight.epochs.tolist(), strict=True))
        return [
            self._finish(
                row,
                "error",
                error=RequestError(words, refused[row] or None)
                if row in refused
                else RowError(words),
            )
            for row, words in result.errors.items()
            if epochs.get(row) == int(self.table.epoch[row])
        ]

    def _extras(
        self, result: StepResult, flight: StepInFlight, runs: TokenRuns, tokens: list[str]
    ) -> dict[str, Any]:
        """What the executor gave beside tokens, by request instead of by row; tokens: whose the
        step's tokens are.
        """
        names = {row: self.table.names[row] for row in runs.rows.tolist()}
        starts = dict(zip(flight.rows.tolist(), flight.plan.starts.tolist(), strict=True))
        counts = Counter(tokens)
        return {
            "logprobs": {
                names[row]: given[: counts[names[row]]]
                for row, given in result.logprobs.items()
                if row in names
            },
            "pooled": {names[r]: given for r, given in result.pooled.items() if r in names},
            "prompt_logprobs": {
                names[row]: (starts[row] + 1, entries)
                for row, entries in result.prompt_logprobs.items()
                if row in names
            },
        }

    def _stats(
        self, flight: StepInFlight, result: StepResult, generated: int, drafted: Verified
    ) -> StepStats:
        queried, hits = self.prefix_reuse.take_counts()
        preempted, self._preempted = self._preempted, 0
        return StepStats(
            self._steps,
            len(self._running),
            len(self.queue),
            self.cache.usage,
            computed=len(flight.plan.tokens),
            generated=generated,
            preempted=preempted,
            queried=queried,
            hit=hits,
            plan_seconds=flight.seconds,
            run_seconds=result.seconds,
            routed=() if result.routed is None else tuple(result.routed.tolist()),
            **drafting_figures(drafted),
        )

    def _end(self, row: int, token: int, stopped: bool) -> Finish:
        if stopped:
            return self._finish(row, "stop", stop=self._running[row].request.stop_reason(token))
        return self._finish(row, "length")

    def _finish(
        self, row: int, reason: Reason, stop: int | None = None, error: Exception | None = None
    ) -> Finish:
        entry = self._running[row]
        self._release(row)
        self.transfers.finished(entry.request.id)
        del self._entries[entry.request.id]
        return Finish(entry.request.id, reason, stop, error)

    def _release(self, row: int) -> np.ndarray:
        """Take row and blocks back; the tokens it had."""
        entry = self._running.pop(row)
        self._prefilling.discard(row)
        self._order = None
        self._generation += 1
        if not self.transfers.release(row):
            self._released.append(row)
        self.adapters.release(entry.request.adapter)
        self.encoders.release(row)
        self.prefix_reuse.release(row)
        self.drafting.release(row)
        self.cache.release(row)
        return self.table.release(row)
