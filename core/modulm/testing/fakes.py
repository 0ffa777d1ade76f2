"""A model that is arithmetic, behind the executor contract, for tests of everything above it.

The next token of a row is a hash of the row's whole history, *read back through its block tables*
from a simulated cache: a wrong block, slot or position gives an error or tokens that differ from
`reference_tokens`, which is computed outside of any engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import define

from modulm.contracts.config import EngineConfig
from modulm.contracts.connector import KVMover
from modulm.contracts.executor import (
    Capacity,
    Executor,
    GroupCapacity,
    PartReport,
    Plan,
    RowFailure,
    RowLogprobs,
    RowStart,
    StepResult,
)
from modulm.contracts.sampling import PoolingParams, StructuredOutputs
from modulm.testing.arithmetic import digest_of, encoded_tokens, token_of
from modulm.testing.arithmetic_rows import (
    FakeDrafter,
    FakeFault,
    Group,
    Script,
    reference_tokens,
)
from modulm.testing.media import LAYERS, run_layers

__all__ = [
    "FakeDrafter",
    "FakeExecutor",
    "FakeFault",
    "Group",
    "Script",
    "encoded_tokens",
    "reference_tokens",
]

_NEVER = -1


@define
class _ScriptedRow:
    """What the fake keeps per row: the history it expects the plan to feed."""

    start: RowStart
    script: Script
    history: list[int]
    computed: int | None = None
    sampled: int = 0
    first: int = 0
    failed: str | None = None

    @property
    def seed(self) -> int | None:
        params = self.start.params
        if isinstance(params, PoolingParams) or params.greedy:
            return None
        return self.start.seed


class FakeExecutor(Executor):
    """Runs plans on the arithmetic model and checks every plan it is given.

    scripts: request id -> Script, or a function of the RowStart. step_delay: seconds per step.
    fail_steps: index of the step as run (from 0) -> the exception it raises. `plans` keeps the
    plans that ran; `resume` lets hanging steps go on. compiling: request -> what `prepare` gives;
    `prepared`: the requests that were prepared and not forgotten. drafter: given a row's tokens and
    the next ones that will come, proposes up to `drafts`; stray_drafts: results also propose for
    rows that did not run. mover: of a KV connector, whose tensors are the tokens and positions that
    blocks hold. adapters: slots that plans may give. encoder: embeddings that a step may give, and
    that may be kept; an item has as many rows, which go through LAYERS layers. encoder_rows: rows
    times layers that run in a step in which rows decode (0: items are encoded whole); whole_media:
    no chunk of a prompt ends inside of an item.
    """

    name = "fake"
    api: ClassVar[int | tuple[int, int]] = 3

    def __init__(
        self,
        groups: Sequence[Group] = (Group(),),
        *,
        vocabulary: int = 512,
        reserved: int = 8,
        max_model_len: int = 256,
        scripts: Mapping[str, Script] | Callable[[RowStart], Script | None] | None = None,
        step_delay: float = 0.0,
        fail_steps: Mapping[int, Exception] | None = None,
        keep_plans: bool = False,
        compiling: Mapping[str, Future[None]] | None = None,
        drafts: int = 0,
        drafter: FakeDrafter | None = None,
        stray_drafts: bool = False,
        mover: KVMover | None = None,
        adapters: int = 0,
        encoder: tuple[int, int] = (0, 0),
        encoder_rows: int = 0,
        whole_media: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.vocabulary = vocabulary
        self.reserved = reserved
        self.max_model_len = max_model_len
        self.scripts: Any = scripts or {}
        self.step_delay = step_delay
        self.fail_steps = dict(fail_steps or {})
        self.plans: list[Plan] | None = [] if keep_plans else None
        self.compiling = dict(compiling or {})
        self.prepared: list[str] = []
        self.drafts = drafts
        self.drafter = drafter
        self.stray_drafts = stray_drafts
        self.mover = mover
        self.slots: list[str | None] = [None] * (adapters + 1)
        self.encoder = encoder
        self.encoder_rows = encoder_rows
        self.whole_media = whole_media
        self.encoded: dict[bytes, int] = {}
        #: Hash -> layers that are left, of items that are encoded in pieces.
        self.begun: dict[bytes, int] = {}
        self.encodings = 0
        self.steps = 0
        self.resume = threading.Event()
        self.rows: dict[int, _ScriptedRow] = {}
        self._tokens = [np.zeros((g.blocks, g.block_size), dtype=np.int64) for g in self.groups]
        self._positions = [np.full((g.blocks, g.block_size), _NEVER) for g in self.groups]
        self._states: list[dict[int, tuple[int, ...]]] = [{} for _ in self.groups]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fake-executor")

    def start(self, config: EngineConfig | None = None) -> Capacity:
        if self.mover is not None:
            both = enumerate(zip(self._tokens, self._positions, strict=True))
            self.mover.open({g: [torch.from_numpy(x) for x in pair] for g, pair in both})
        groups = tuple(
            GroupCapacity("state" if g.state else "attention", g.block_size, g.window, g.blocks)
            for g in self.groups
        )
        encoder = {
            "tokens": self.encoder[0],
            "cache": self.encoder[1],
            "rows": self.encoder_rows,
            "whole": self.whole_media,
        }
        return Capacity(
            groups=groups,
            vocabulary=self.vocabulary,
            max_model_len=self.max_model_len,
            parts={
                "adapters": {"slots": len(self.slots) - 1},
                "drafts": {"drafts": self.drafts, "ahead": 0},
                "media": encoder,
                "pooling": {"pools": True},
            },
        )

    def submit(self, plan: Plan) -> Future[StepResult]:
        return self._thread.submit(self.run, plan)

    def stop(self) -> None:
        self.resume.set()
        self._thread.shutdown(wait=True)

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        self.prepared.append(request)
        done: Future[None] = Future()
        done.set_result(None)
        return self.compiling.get(request, done)

    def forget(self, request: str) -> None:
        self.prepared.remove(request)

    def run(self, plan: Plan) -> StepResult:
        began = time.perf_counter()
        index, self.steps = self.steps, self.steps + 1
        if self.plans is not None:
            self.plans.append(plan)
        self._rows_change(plan)
        for slot, name in plan.parts.get("adapters", ()):
            self.slots[slot] = name
        reports: dict[str, Any] = {"media": self._encode(plan) or None}
        if self.step_delay:
            time.sleep(self.step_delay)
        if index in self.fail_steps:
            raise self.fail_steps[index]
        tokens = self._feed(plan)
        sampled, result = self._sample(plan, tokens)
        reports["pooling"] = result.pop("pooled")
        reports["transfers"] = self._transfer(plan)
        reports["drafts"] = self._propose(plan) if self.drafter is not None else None
        accepted = np.array([len(run) for run in sampled], dtype=np.int32)
        return StepResult(
            step=plan.step,
            tokens=np.array([token for run in sampled for token in run], dtype=np.int64),
            accepted=None if (accepted == 1).all() else accepted,
            parts=tuple(
                PartReport(name, value) for name, value in reports.items() if value is not None
            ),
            seconds=time.perf_counter() - began,
            **result,
        )

    def _rows_change(self, plan: Plan) -> None:
        """Releases come before admissions, so that a row may be reused within one plan."""
        for row in plan.release:
            if self.rows.pop(row, None) is None:
                raise FakeFault(f"step {plan.step} releases row {row}, which is not admitted")
        for start in plan.admit:
            if start.row in self.rows:
                raise FakeFault(f"step {plan.step} admits row {start.row}, which is taken")
            history = [int(t) for t in start.prompt] + [int(t) for t in start.output]
            first = len(start.output)
            self.rows[start.row] = _ScriptedRow(start, self._script(start), history, first=first)

    def _script(self, start: RowStart) -> Script:
        script = self.scripts(start) if callable(self.scripts) else self.scripts.get(start.request)
        return script or Script()

    def _feed(self, plan: Plan) -> list[np.ndarray]:
        """Check the plan and write its tokens to the cache; the tokens of each row."""
        self._check_shapes(plan)
        ends = np.cumsum(plan.counts)
        fed = []
        for i, row in enumerate(plan.rows.tolist()):
            state = self.rows.get(row)
            if state is None:
                raise FakeFault(f"step {plan.step} runs row {row}, which is not admitted")
            adapter = state.start.parts.get("adapters")
            if adapter is not None and adapter.name not in self.slots:
                raise FakeFault(f"step {plan.step} row {row}: adapter {adapter.name} in no slot")
            start, count = int(plan.starts[i]), int(plan.counts[i])
            if state.failed is not None:
                fed.append(np.zeros(0, dtype=np.int64))
                continue
            drafted = 0 if plan.drafted is None else int(plan.drafted[i])
            first, last = int(ends[i]) - count, int(ends[i]) - drafted
            tokens = self._history(plan, state, row, start, plan.tokens[first:last])
            state.computed = start + len(tokens)
            if drafted:
                drafts = plan.tokens[last : ends[i]]
                self._check_drafts(plan, i, drafts)
                tokens = np.concatenate([tokens, drafts])
            if "media" in state.start.parts:
                tokens = self._embedded(plan, state.start, start, tokens)
            for g, group in enumerate(self.groups):
                if group.state:
                    self._advance(g, plan, i, tokens)
                else:
                    self._write(g, row, plan.tables[g][i], start, tokens)
            fed.append(tokens)
        return fed

    def _check_shapes(self, plan: Plan) -> None:
        rows = len(plan.rows)
        if len(set(plan.rows.tolist())) != rows:
            raise FakeFault(f"step {plan.step} runs a row twice: {plan.rows.tolist()}")
        if not (len(plan.starts) == len(plan.counts) == len(plan.samples) == rows):
            raise FakeFault(f"step {plan.step}: rows, starts, counts and samples differ in length")
        if rows and int(plan.counts.min()) < 1:
            raise FakeFault(f"step {plan.step}: a row computes no token")
        if int(plan.counts.sum()) != len(plan.tokens):
            raise FakeFault(
                f"step {plan.step}: counts sum to {plan.counts.sum()}, "
                f"{len(plan.tokens)} tokens were given"
            )
        if len(plan.tables) != len(self.groups):
            raise FakeFault(
                f"step {plan.step}: {len(plan.tables)} tables for {len(self.groups)} cache groups"
            )

    def _encode(self, plan: Plan) -> tuple[bytes, ...]:
        work = plan.parts.get("media")
        for digest in work.drop if work else ():
            del self.encoded[digest]
            self.begun.pop(digest, None)
        chosen = work.items if work else ()
        items = [self.rows[row].start.parts["media"].items[index] for row, index in chosen]
        for item in items:
            if item.hash in self.encoded:
                raise FakeFault(f"step {plan.step} encodes {item.hash!r} again")
            self.encoded[item.hash] = item.length
        self.encodings += len(items)
        if sum(i.length for i in items) > self.encoder[0]:
            raise FakeFault(f"step {plan.step} encodes more than {self.encoder[0]} tokens")
        if sum(self.encoded.values()) > self.encoder[1]:
            raise FakeFault(f"after step {plan.step} more than {self.encoder[1]} tokens are kept")
        self.begun |= dict.fromkeys((item.hash for item in items), LAYERS)
        return run_layers(self.begun, self.encoded, work.rows if work else 0)

    def _embedded(self, plan: Plan, row: RowStart, start: int, tokens: np.ndarray) -> np.ndarray:
        """The tokens with those of media replaced by what was encoded."""
        result, end = tokens.copy(), start + len(tokens)
        for item in row.parts["media"].items:
            if any(first < end < last for first, last in item.spans):
                raise FakeFault(f"step {plan.step} {row.request}: ends inside of a span at {end}")
            first, last = max(start, item.start), min(end, item.start + item.length)
            if first < last:
                if item.encoded and (item.hash not in self.encoded or item.hash in self.begun):
                    raise FakeFault(f"step {plan.step} {row.request}: {item.hash!r} not encoded")
                embedded = encoded_tokens(item)[first - item.start : last - item.start]
                result[first - start : last - start] = embedded
        return result

    def _transfer(self, plan: Plan) -> object | None:
        if self.mover is None:
            return None
        if "transfers" in plan.parts:
            self.mover.begin(plan.parts["transfers"])
        return self.mover.ended()

    def _check_drafts(self, plan: Plan, i: int, drafts: np.ndarray) -> None:
        row, state = int(plan.rows[i]), self.rows[int(plan.rows[i])]
        proposed = np.array(drafts)
        if not plan.samples[i] or len(proposed) > self.drafts:
            raise FakeFault(f"step {plan.step} row {row}: {len(proposed)} drafts where none belong")
        if ((proposed < 0) | (proposed >= self.vocabulary)).any():
            raise FakeFault(f"step {plan.step} row {row}: drafts {proposed.tolist()} do not exist")
        params = state.start.params
        most = None if isinstance(params, PoolingParams) else params.max_tokens
        made = state.first + state.sampled
        if most is not None and made + len(proposed) + 1 > most:
            raise FakeFault(f"step {plan.step} row {row}: drafts go past max_tokens {most}")

    def _advance(self, g: int, plan: Plan, i: int, tokens: np.ndarray) -> None:
        """A state group: read the state before the row's first token, write those on the way."""
        size, states, table = self.groups[g].block_size, self._states[g], plan.tables[g][i]
        row, start, last = int(plan.rows[i]), int(plan.starts[i]), len(tokens) - 1
        held = states.get(int(table[(start - 1) // size]), ()) if start else ()
        if len(held) != start:
            raise FakeFault(f"row {row} group {g}: a state of {len(held)} tokens, not {start}")
        for offset, token in enumerate(tokens.tolist()):
            held = (*held, token)
            slots = [int(table[(start + offset) // size])]
            if offset == last and not slots[0]:
                raise FakeFault(f"row {row} group {g}: no slot for the state of {len(held)} tokens")
            if offset < last and len(held) % size:
                slots = []
            if offset < last and plan.drafted is not None and plan.drafted[i]:
                slots.append(int(self._state_slots(plan, g)[i, offset]))
                if not slots[-1]:
                    raise FakeFault(f"row {row} group {g}: no slot for the state of draft {offset}")
            states.update(dict.fromkeys([slot for slot in slots if slot], held))

    def _state_slots(self, plan: Plan, g: int) -> np.ndarray:
        slots = plan.state_slots[g] if plan.state_slots else None
        if slots is None:
            raise FakeFault(f"step {plan.step} group {g}: drafts without slots for their states")
        return slots

    def _state(self, g: int, plan: Plan, i: int, position: int) -> tuple[int, np.ndarray]:
        """The same as `_read`, from a state group."""
        offset = position - int(plan.starts[i])
        slot = int(plan.tables[g][i][position // self.groups[g].block_size])
        if offset < int(plan.counts[i]) - 1:
            slot = int(self._state_slots(plan, g)[i, offset])
        held = self._states[g].get(slot, ())
        if len(held) != position + 1:
            raise FakeFault(f"row {plan.rows[i]} group {g}: slot {slot} holds {len(held)} tokens")
        return 0, np.array(held, dtype=np.int64)

    def _history(
        self, plan: Plan, state: _ScriptedRow, row: int, start: int, tokens: np.ndarray
    ) -> np.ndarray:
        """The row's tokens with placeholders resolved, checked against the history it has."""
        if state.computed is not None and start != state.computed:
            raise FakeFault(
                f"step {plan.step} row {row} starts at {start}, "
                f"but {state.computed} tokens are computed"
            )
        history = np.array(state.history[start : start + len(tokens)], dtype=np.int64)
        if len(history) < len(tokens):
            raise FakeFault(
                f"step {plan.step} row {row} computes up to {start + len(tokens)}, "
                f"but knows {len(state.history)} tokens"
            )
        real = tokens >= 0
        if (tokens[real] != history[real]).any():
            raise FakeFault(
                f"step {plan.step} row {row} from {start}: tokens {tokens.tolist()}, "
                f"but its history says {history.tolist()}"
            )
        holes = np.flatnonzero(~real)
        if len(holes) and (state.sampled == 0 or start + int(holes[0]) < len(state.history) - 1):
            raise FakeFault(f"step {plan.step} row {row}: a placeholder where no token was sampled")
        return history

    def _write(self, g: int, row: int, table: np.ndarray, start: int, tokens: np.ndarray) -> None:
        positions = np.arange(start, start + len(tokens))
        blocks, offsets = self._slots(g, row, table, positions)
        self._tokens[g][blocks, offsets] = tokens
        self._positions[g][blocks, offsets] = positions

    def _slots(
        self, g: int, row: int, table: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        size = self.groups[g].block_size
        places = positions // size
        if places[-1] >= len(table):
            raise FakeFault(
                f"row {row} group {g}: position {positions[-1]} needs "
                f"{places[-1] + 1} blocks, its table has {len(table)}"
            )
        blocks = np.asarray(table)[places]
        bad = (blocks <= 0) | (blocks >= self.groups[g].blocks)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise FakeFault(
                f"row {row} group {g}: position {positions[at]} is in block "
                f"{blocks[at]}, which is the null block or outside of the pool"
            )
        return blocks, positions % size

    def _read(self, g: int, row: int, table: np.ndarray, position: int) -> tuple[int, np.ndarray]:
        """(first visible position, tokens from it up to `position`) as the cache holds them."""
        first = self.groups[g].first_visible(position)
        positions = np.arange(first, position + 1)
        blocks, offsets = self._slots(g, row, table, positions)
        held = self._positions[g][blocks, offsets]
        wrong = np.flatnonzero(held != positions)
        if len(wrong):
            at = int(wrong[0])
            raise FakeFault(
                f"row {row} group {g}: block {blocks[at]} offset {offsets[at]} should "
                f"hold position {positions[at]}, holds {held[at]}"
            )
        return first, self._tokens[g][blocks, offsets]

    def _sample(
        self, plan: Plan, fed: Sequence[np.ndarray]
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """The tokens of each sampling row, and what else a result holds, by name."""
        sampled: list[list[int]] = []
        result: dict[str, Any] = {
            "logprobs": {},
            "prompt_logprobs": {},
            "pooled": {},
            "errors": {},
        }
        for i, row in enumerate(plan.rows.tolist()):
            state = self.rows[row]
            if state.failed is not None:
                result["errors"][row] = RowFailure(state.failed)
                sampled.extend([[]] * bool(plan.samples[i]))
                continue
            self._prompt_logprobs(state, row, int(plan.starts[i]), len(fed[i]), result)
            if not plan.samples[i]:
                continue
            drafted = 0 if plan.drafted is None else int(plan.drafted[i])
            drafts = fed[i][len(fed[i]) - drafted :].tolist()
            end = int(plan.starts[i] + plan.counts[i]) - drafted
            if end != len(state.history):
                raise FakeFault(
                    f"step {plan.step} row {row} samples after {end} tokens, "
                    f"but knows {len(state.history)}"
                )
            sampled.append(self._verify(plan, i, end - 1, drafts, result))
        return sampled, result

    def _verify(
        self, plan: Plan, i: int, position: int, drafts: list[int], result: dict[str, Any]
    ) -> list[int]:
        """The row's own tokens from `position` on, as far as its drafts agree, and one more."""
        row, state = int(plan.rows[i]), self.rows[int(plan.rows[i])]
        run: list[int] = []
        for draft in (*drafts, None):
            if run and state.first + state.sampled in (*state.script.errors, *state.script.nan):
                break
            parts = [
                self._state(g, plan, i, position)
                if group.state
                else self._read(g, row, plan.tables[g][i], position)
                for g, group in enumerate(self.groups)
            ]
            run += self._next(row, state, digest_of(parts, state.seed), result)
            if not run or run[-1] != draft:
                break
            position += 1
        state.computed = (state.computed or 0) + max(len(run) - 1, 0)
        return run

    def _propose(self, plan: Plan) -> dict[int, np.ndarray]:
        """Drafts for the rows that sampled."""
        drafts = {}
        for row in plan.rows[plan.samples].tolist():
            state = self.rows[row]
            if self.drafter is None or isinstance(state.start.params, PoolingParams):
                continue
            script = state.script.tokens[state.first + state.sampled :]
            windows = [group.window for group in self.groups]
            coming = reference_tokens(
                state.history, self.drafts, vocabulary=self.vocabulary, reserved=self.reserved,
                windows=windows, seed=state.seed, script=script,
            )  # fmt: skip
            drafts[row] = np.array(self.drafter(state.history, coming), dtype=np.int64)
        if self.stray_drafts:
            drafts |= {row: np.array([9, 9]) for row in range(64) if row not in drafts}
        return drafts

    def _next(
        self, row: int, state: _ScriptedRow, digest: int, result: dict[str, Any]
    ) -> list[int]:
        params, script = state.start.params, state.script
        if isinstance(params, PoolingParams):
            result["pooled"][row] = np.array([digest % 997, digest % 991], dtype=np.float32)
            return []
        k = state.first + state.sampled
        self._incidents(script, k)
        if k in script.nan or k in script.errors:
            state.failed = script.errors.get(k, "the model returned NaN logits for this row")
            result["errors"][row] = RowFailure(state.failed)
            return []
        scripted = k < len(script.tokens)
        token = script.tokens[k] if scripted else token_of(digest, self.vocabulary, self.reserved)
        state.history.append(token)
        state.sampled += 1
        if params.logprobs is not None:
            entry = self._best(token, params.logprobs)
            result["logprobs"][row] = (*result["logprobs"].get(row, ()), entry)
        return [token]

    def _incidents(self, script: Script, k: int) -> None:
        if script.delay:
            time.sleep(script.delay)
        if script.hang == k:
            self.resume.wait()
        if script.crash == k:
            raise RuntimeError(f"scripted crash at token {k}")

    def _best(self, token: int, count: int) -> RowLogprobs:
        """Made-up logprobs with the shape of real ones: the chosen token, then the best."""
        best = self.vocabulary if count < 0 else count
        ids = (token + np.arange(best)) % self.vocabulary
        values = -0.5 * (1.0 + np.arange(best, dtype=np.float32))
        return RowLogprobs(
            ids=np.concatenate([[token], ids]),
            values=np.concatenate([[-0.5], values]).astype(np.float32),
            rank=1,
        )

    def _prompt_logprobs(
        self, state: _ScriptedRow, row: int, start: int, count: int, result: dict[str, Any]
    ) -> None:
        params = state.start.params
        if isinstance(params, PoolingParams) or params.prompt_logprobs is None:
            return
        following = state.start.prompt[start + 1 : start + 1 + count]
        if len(following):
            entries = tuple(self._best(int(t), params.prompt_logprobs) for t in following)
            result["prompt_logprobs"][row] = entries
