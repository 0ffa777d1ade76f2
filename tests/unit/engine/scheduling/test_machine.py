"""A model checker for scheduler and cache: any order of arrivals, aborts and steps, with prefixes,
preemption, transfers, adapters, media and drafts at once, under each scheduling policy.

What it promises: pools conserve their blocks after every step; the request that a policy puts first
never waits more than `PATIENCE` steps for a token or a part of its prompt; every request ends, with
the tokens that it gets alone. `make fuzz` runs it with new examples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modulm.contracts.media import MediaItem
from modulm.contracts.policy import Policy
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import ByArrival, check_empty, free_blocks, make_engine
from modulm.testing.fakes import FakeExecutor, Group, encoded_tokens, reference_tokens
from modulm_scheduler_fair.policy import Fair
from modulm_scheduler_priority import Priority

#: Steps in which the first request must have progressed: it may wait for transfers (3 polls each),
#: for a slot that the adapter of a running request has, and for the encoder. With fair shares also
#: for the quanta of the other tenants, which may be owed more.
PATIENCE = {"arrival": 40, "priority": 40, "fair": 160}
TENANTS = ("", "ann", "bob")
PLACEHOLDER = 7
MEMORIES = [
    (Group(4, 100),),
    (Group(4, 24),),
    (Group(4, 40), Group(4, 34, window=9)),
    (Group(4, 30, window=6), Group(4, 60)),
]


def drafter(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Right up to a place that depends on the history."""
    good = sum(history) % (len(coming) + 1)
    return [*coming[:good], *(8 + (token + 1) % 50 for token in coming[good:])]


@define
class Submitted:
    """A request: the text that it amounts to, and the step in which it last progressed."""

    text: np.ndarray
    tokens: int
    salt: str | None
    priority: int = 0
    progressed: int = 0
    computed: int = 0
    aborted: bool = False


class Scheduling(RuleBasedStateMachine):
    """Rules submit, abort, step, and forget prefixes."""

    @initialize(
        groups=st.sampled_from(MEMORIES),
        rows=st.integers(1, 5),
        tokens=st.integers(12, 60),
        long=st.sampled_from([0, 8]),
        reserve=st.booleans(),
        depth=st.integers(1, 2),
        drafts=st.sampled_from([0, 3]),
        slow=st.integers(0, 3),
        bad=st.integers(2, 5),
        policy=st.sampled_from(sorted(PATIENCE)),
    )
    def start(
        self,
        groups: tuple[Group, ...],
        rows: int,
        tokens: int,
        long: int,
        reserve: bool,
        depth: int,
        drafts: int,
        slow: int,
        bad: int,
        policy: str,
    ) -> None:
        connector = FakeConnector(lambda i: i % (slow + 1), lambda i: i % bad == 0)
        self.executor = FakeExecutor(
            groups, max_model_len=70, adapters=2, encoder=(8, 12), mover=connector.mover(),
            drafts=drafts, drafter=drafter if drafts else None,
        )  # fmt: skip
        limits = Limits(rows=rows, tokens=tokens, long=long, reserve=reserve)
        policies: dict[str, Policy] = {
            "arrival": ByArrival(), "priority": Priority(), "fair": Fair(2 * tokens),
        }  # fmt: skip
        self.policy = policy
        self.engine, self.seen = make_engine(
            self.executor, limits, policies[policy], depth, connector=connector
        )
        self.windows = [group.window for group in groups]
        self.requests: dict[str, Submitted] = {}
        self.steps = 0
        self.waiting_first: str | None = None

    @rule(
        stem=st.sampled_from([[], [9] * 8, [9] * 17, [10, 11, 12, 13] * 5]),
        tail=st.lists(st.integers(8, 20), min_size=1, max_size=10),
        tokens=st.integers(1, 14),
        adapter=st.sampled_from([None, None, "a", "b", "c"]),
        image=st.integers(0, 6),
        salt=st.sampled_from([None, "x"]),
        tenant=st.integers(0, 2),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
    )
    def submit(
        self,
        stem: list[int],
        tail: list[int],
        tokens: int,
        adapter: str | None,
        image: int,
        salt: str | None,
        tenant: int,
        priority: int,
    ) -> None:
        prompt, media = np.array([*stem, *tail]), ()
        text = prompt.copy()
        if image:
            at, length = len(stem), min(image, len(tail))
            item = MediaItem("image", bytes([image, length]), at, length)
            prompt[at : at + length], media = PLACEHOLDER, (item,)
            text[at : at + length] = encoded_tokens(item)
        name = f"r{len(self.requests)}"
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        arrival = len(self.requests)
        self.requests[name] = Submitted(text, tokens, salt, priority, self.steps)
        self.engine.submit(
            Request(
                id=name, prompt=prompt, params=params, adapter=adapter, media=media, salt=salt,
                tenant=TENANTS[tenant], weight=1.0 + tenant, priority=priority, arrival=arrival,
            )
        )  # fmt: skip

    @precondition(lambda self: self.open())
    @rule(number=st.integers(0, 50))
    def abort(self, number: int) -> None:
        name = self.open()[number % len(self.open())]
        self.requests[name].aborted = True
        self.engine.abort(name)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.scheduler.forget_prefixes()

    def open(self) -> list[str]:
        """The requests that have neither ended nor been aborted, oldest first."""
        return [
            name
            for name, request in self.requests.items()
            if name not in self.seen.finished and not request.aborted
        ]

    def first(self) -> str | None:
        """The open request that the policy puts first; with fair shares, the oldest one that is not
        in the background, if there is one.
        """
        waiting = self.open()
        if self.policy == "priority":
            return min(waiting, key=lambda name: self.requests[name].priority, default=None)
        if self.policy == "fair":
            return min(waiting, key=lambda name: self.requests[name].priority > 0, default=None)
        return next(iter(waiting), None)

    def tick(self) -> bool:
        before = {name: len(self.seen.tokens.get(name, ())) for name in self.open()}
        busy = self.engine.tick()
        self.steps += 1
        computing = {
            state.start.request: state.computed or 0 for state in list(self.executor.rows.values())
        }
        for name, tokens in before.items():
            request, computed = self.requests[name], computing.get(name, 0)
            if len(self.seen.tokens.get(name, ())) > tokens or computed > request.computed:
                request.progressed = self.steps
            request.computed = computed
        if (first := self.first()) is not None:
            request = self.requests[first]
            if first != self.waiting_first:
                self.waiting_first, request.progressed = first, self.steps
            waited = self.steps - request.progressed
            assert waited <= PATIENCE[self.policy], f"{first} has not progressed for {waited} steps"
        return busy

    @invariant()
    def pools_conserve_their_blocks(self) -> None:
        for group in self.engine.scheduler.cache.groups if hasattr(self, "engine") else ():
            pool = group.pool
            free = free_blocks(pool)
            assert len(free) == len(set(free)) == pool.free
            assert pool.used >= 0
            assert not set(free) & set(group.tables[group.tables > 0].tolist())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            while self.tick():
                pass
            for name, request in self.requests.items():
                expected = reference_tokens(request.text, request.tokens, windows=self.windows)
                tokens = self.seen.tokens.get(name, [])
                if request.aborted:
                    assert tokens == expected[: len(tokens)]
                else:
                    assert self.seen.finished[name].reason == "length"
                    assert tokens == expected
            check_empty(self.engine)
        finally:
            self.executor.stop()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(
    max_examples=600 if "MODULM_FUZZ" in os.environ else 15, stateful_step_count=25, deadline=None
)
