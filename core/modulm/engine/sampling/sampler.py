"""Sampler: from logits to tokens, in the order that vLLM documents.

Grammar mask, allowed ids, bad words, minimum length, bias, processors, penalties, temperature,
processors that keep the argmax, min-p, top-k, top-p, draw, logprobs. The steps that a row needs are
determined on admission and stored as flags, so a step of only greedy rows is one argmax.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from attrs import define, field, frozen

from modulm.contracts.executor import RowFailure, RowLogprobs, RowStart
from modulm.contracts.grammar import Grammar, Matcher
from modulm.contracts.kernels import Ops
from modulm.contracts.platform import Platform, Transfer
from modulm.contracts.sampling import RowView, SamplingParams
from modulm.contracts.step_part import Verified
from modulm.engine.sampling.logit_constraints import LogitConstraint, MinTokens, constraints_of
from modulm.engine.sampling.logits_processors import Processors
from modulm.engine.sampling.penalties import Seen, penalise, wants_penalties
from modulm.errors import RequestError

__all__ = ["Best", "Chosen", "Sampled", "Sampler"]

#: CPU time limit of one row's grammar in a step; rows that exceed it fail.
_GRAMMAR_SECONDS = 0.5
_GRAMMARS = "structured_outputs"
#: Upper bound of temperatures, finite in float32: -inf divided by inf would be NaN.
_HOTTEST = 1e30

_DRAWN, _LOGPROBS, _CONSTRAINED, _PENALISED, _GRAMMAR, _EARLY, _LATE = (1 << i for i in range(7))
_HISTORY = _CONSTRAINED | _PENALISED | _GRAMMAR | _EARLY | _LATE
#: Parents of drafts: none are trees.
_CHAINS: Mapping[int, Sequence[int]] = {}
_CHANGED = _CONSTRAINED | _PENALISED | _EARLY | _LATE


@frozen(eq=False)
class Sampled:
    """The result of sampling. tokens: [n] int64, -1 if failed. logprobs, errors: by index."""

    tokens: np.ndarray
    logprobs: Mapping[int, RowLogprobs] = field(factory=dict)
    errors: Mapping[int, RowFailure] = field(factory=dict)


class Best:
    """Top logprobs of some indices, being copied to the host."""

    def __init__(self, places: Sequence[int], transfer: Transfer) -> None:
        self._places = places
        self._transfer = transfer

    def entries(self) -> Iterator[tuple[int, RowLogprobs]]:
        """Wait for the copy and yield (index, log probabilities)."""
        ids, values, rank = self._transfer.wait()
        for index, *entry in zip(self._places, ids, values, rank.tolist(), strict=True):
            yield index, RowLogprobs(*entry)


@define(eq=False)
class Chosen:
    """Sampled tokens, being copied to the host.

    device: [n] int64, -1 if sampling failed. logits: their source, to explain failures.
    """

    device: torch.Tensor
    transfer: Transfer
    logits: torch.Tensor
    best: Sequence[Best] = ()
    errors: dict[int, RowFailure] = field(factory=dict)
    _tokens: np.ndarray | None = None

    def tokens(self) -> np.ndarray:
        """Wait for the tokens: [n] int64. Failed indices are then in `errors`."""
        if self._tokens is None:
            (self._tokens,) = self.transfer.wait()
            for index in (self._tokens < 0).nonzero()[0].tolist():
                self.errors.setdefault(index, _why(self.logits[index]))
        return self._tokens

    def result(self) -> Sampled:
        """Wait for tokens, logprobs and errors."""
        tokens = self.tokens()
        if self.errors:
            tokens = tokens.copy()
            tokens[list(self.errors)] = -1
        entries = (entry for best in self.best for entry in best.entries())
        logprobs = {index: entry for index, entry in entries if index not in self.errors}
        return Sampled(tokens, logprobs, self.errors)


@define(eq=False)
class _RowState:
    """Sampling state of a row that depends on its history."""

    view: RowView
    output: list[int]
    constraints: list[LogitConstraint]
    stops: frozenset[int]
    seen: Seen | None
    matcher: Matcher | None

    def fill(self, mask: np.ndarray) -> None:
        """Fill the grammar's bit mask of allowed tokens: [ceil(vocabulary / 32)] int32."""
        if self.matcher is not None:
            self.matcher.fill(mask)


@define(eq=False)
class _Step:
    """One call of `sample`: places are indices into the step's sampling rows."""

    rows: np.ndarray
    flags: np.ndarray
    logits: torch.Tensor
    positions: np.ndarray
    errors: dict[int, RowFailure] = field(factory=dict)

    def places(self, flag: int) -> list[int]:
        """Return the indices of rows that have `flag` and have not failed."""
        indices = np.flatnonzero(self.flags & flag).tolist()
        return [index for index in indices if index not in self.errors]


class Sampler:
    """Stores the sampling state of all rows and samples their next tokens.

    rows: maximum number of rows. mode: `--logprobs-mode`.
    """

    def __init__(
        self,
        ops: Ops,
        platform: Platform,
        *,
        vocabulary: int,
        rows: int,
        mode: str = "raw_logprobs",
        processors: Processors | None = None,
    ) -> None:
        self.ops = ops
        self.vocabulary = vocabulary
        self.device = platform.device
        self.mode = mode
        self.processors = processors or Processors()
        self._platform = platform
        self._staging = platform.staging()
        self._rows: dict[int, _RowState] = {}
        self._flags = np.zeros(rows, dtype=np.int32)
        self._flagged: set[int] = set()  # rows with any flag
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_k = np.zeros(rows, dtype=np.int32)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._min_p = np.zeros(rows, dtype=np.float32)
        self._seeds = np.zeros(rows, dtype=np.int64)
        self._best = np.zeros(rows, dtype=np.int32)
        self._named: dict[int, Sequence[int]] = {}

    def admit(
        self, start: RowStart, params: SamplingParams, grammar: Grammar | None = None
    ) -> None:
        """Start a row. Exceptions of its grammar or of processors propagate."""
        row = start.row
        flags = self._numbers(row, start, params)
        output = [int(token) for token in start.output]
        active = self.processors.processors_for(params)
        view = RowView(row, params, start.prompt.tolist() if active else (), output)
        constraints = constraints_of(start, params, self.device)
        penalised = wants_penalties(params)
        text = start.prompt if start.text is None else start.text
        seen = Seen(params, text, output, self.vocabulary) if penalised else None
        matcher = None if grammar is None else _replayed(grammar, start.output)
        early, late = self.processors.admit(view, active) if active else (False, False)
        flags |= _CONSTRAINED * bool(constraints) | _PENALISED * penalised
        flags |= _GRAMMAR * (matcher is not None)
        flags |= _EARLY * early | _LATE * (late and not params.greedy)
        if flags & _HISTORY:
            stops = frozenset(start.stop_ids)
            self._rows[row] = _RowState(view, output, constraints, stops, seen, matcher)
        self._flags[row] = flags
        if flags:
            self._flagged.add(row)

    def _numbers(self, row: int, start: RowStart, params: SamplingParams) -> int:
        self._temperature[row] = 0.0 if params.greedy else min(params.temperature, _HOTTEST)
        self._top_k[row] = min(max(params.top_k, 0), self.vocabulary)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        # The int64 with the same low bits.
        self._seeds[row] = ((start.seed or 0) + 2**63) % 2**64 - 2**63
        best = params.logprobs
        self._named[row] = named = params.logprob_token_ids
        # Rows with ids of their own are a group each, with a negative number of best tokens.
        self._best[row] = -1 - row if named else self.vocabulary if best == -1 else best or 0
        return _DRAWN * (not params.greedy) | _LOGPROBS * (best is not None)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._flags[row] = 0
        self._flagged.discard(row)
        self._rows.pop(row, None)
        self.processors.release(row)

    def sample(self, rows: np.ndarray, positions: np.ndarray, logits: torch.Tensor) -> Chosen:
        """Sample one token per row.

        rows: [n]; a row without history may occur repeatedly. positions: [n], of each new token.
        logits: [n, vocabulary], may be overwritten. On devices that queue work this returns before
        it is done, unless a row `waits`.
        """
        flags = self._flags[rows] if self._flagged else self._flags[:0]
        union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        if union == 0:
            tokens = self.ops.argmax(logits)
            return Chosen(tokens, self._platform.fetch((tokens,)), logits)
        step = _Step(rows, flags, logits.float(), positions)
        if union & _GRAMMAR:
            self._mask(step)
        wanted = step.places(_LOGPROBS)
        values = self._raw(step, union, wanted) if wanted and self.mode.startswith("raw") else None
        self._process(step, union)
        temperature = self._temper(step) if union & _LATE else self._temperature[rows]
        if wanted and values is None:
            values = self._processed(step, wanted, temperature)
        tokens = self._choose(step, union, temperature)
        best = () if values is None else self._best_of(step, wanted, values, tokens)
        chosen = Chosen(tokens, self._platform.fetch((tokens,)), logits, best, step.errors)
        if union & _HISTORY:
            self._commit(step, chosen.tokens())
        return chosen

    def verify(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
        parents: Mapping[int, Sequence[int]] = _CHAINS,
    ) -> Verified:
        """Sample rows with drafts, with the same result as single steps.

        Arguments are as in `TokenChooser.verify`. Rows without history are sampled at once, others
        position by position until a mismatch.
        """
        sizes = np.array([len(draft) + 1 for draft in drafts])
        firsts = np.cumsum(sizes) - sizes
        owners = np.repeat(np.arange(len(rows)), sizes)
        depths = np.arange(len(owners)) - firsts[owners]
        #: An index of the logits and the token chosen there -> the index behind that draft.
        after: dict[tuple[int, int], int] = {}
        for row, (first, draft) in enumerate(zip(firsts.tolist(), drafts, strict=True)):
            tree = parents.get(row, range(len(draft)))
            edges = zip(tree, draft.tolist(), strict=True)
            for index, (parent, token) in enumerate(edges, first + 1):
                after.setdefault((first + parent, token), index)
                if row in parents:
                    depths[index] = depths[first + parent] + 1
        history = (self._flags[rows] & _HISTORY) != 0
        tokens = np.full(len(owners), -1, dtype=np.int64)
        logprobs: dict[int, RowLogprobs] = {}
        errors: dict[int, RowFailure] = {}
        at = np.flatnonzero(~history[owners] | (depths == 0))
        while len(at):
            own = logits if len(at) == len(owners) else logits[self._tensor(at)]
            drawn = self.sample(rows[owners[at]], positions[owners[at]] + depths[at], own).result()
            tokens[at] = drawn.tokens
            logprobs.update((int(at[index]), entry) for index, entry in drawn.logprobs.items())
            errors.update((int(at[index]), failure) for index, failure in drawn.errors.items())
            chosen = [(index, int(tokens[index])) for index in at[history[owners[at]]].tolist()]
            at = np.array(
                [after[index, token] for index, token in chosen if (index, token) in after
                 and token not in self._rows[int(rows[owners[index]])].stops],
                dtype=np.int64,
            )  # fmt: skip
        return _runs(firsts.tolist(), tokens, after, logprobs, errors)

    def legal(self, row: int, drafts: np.ndarray) -> np.ndarray:
        """Return the drafts before the first one that the row's grammar forbids."""
        matcher = state.matcher if (state := self._rows.get(row)) else None
        return drafts if matcher is None else drafts[: matcher.count_allowed(drafts.tolist())]

    def forced(self, row: int) -> np.ndarray:
        """Return drafts of the text that the row's grammar determines: [n] int64."""
        matcher = state.matcher if (state := self._rows.get(row)) else None
        return self.legal(row, np.array(matcher.forced() if matcher else (), dtype=np.int64))

    def _mask(self, step: _Step) -> None:
        """Apply the grammars' bit masks."""
        indices = step.places(_GRAMMAR)
        masks = np.zeros((len(indices), -(-self.vocabulary // 32)), dtype=np.int32)
        for index, mask in zip(indices, masks, strict=True):
            began = time.thread_time()
            try:
                self._rows[int(step.rows[index])].fill(mask)
            except Exception as error:
                step.errors[index] = RowFailure(f"the grammar failed: {error}"[:300], _GRAMMARS)
            if time.thread_time() - began > _GRAMMAR_SECONDS:
                step.errors[index] = RowFailure(
                    "the grammar is too ambiguous: a token took too long to check", _GRAMMARS
                )
        at = torch.tensor(indices, dtype=torch.int64, device=self.device)
        self.ops.apply_bitmask(step.logits, at, torch.from_numpy(masks).to(self.device))

    def _raw(self, step: _Step, union: int, places: list[int]) -> torch.Tensor:
        """Return logits before any change: [places, vocabulary]. Copies only if necessary."""
        unchanged = len(places) == len(step.rows) and not union & _CHANGED
        return step.logits if unchanged else step.logits[places]

    def _process(self, step: _Step, union: int) -> None:
        """Apply constraints, early processors and penalties."""
        for index in step.places(_CONSTRAINED):
            try:
                _constrain(self._rows[int(step.rows[index])], step.logits[index])
            except Exception as error:
                message = f"the logits could not be changed: {error}"[:300]
                step.errors[index] = RowFailure(message)
        if union & _EARLY:
            self._run_processors(step, _EARLY, late=False)
        if union & _PENALISED:
            places = step.places(_PENALISED)
            rows = [self._rows[int(step.rows[index])].seen for index in places]
            seen = [row for row in rows if row is not None]
            if seen:
                penalise(self.ops, step.logits, places, seen)

    def _run_processors(self, step: _Step, flag: int, *, late: bool) -> None:
        views = {index: self._rows[int(step.rows[index])].view for index in step.places(flag)}
        errors = self.processors.apply(views, step.logits, late=late)
        step.errors.update((index, RowFailure(message)) for index, message in errors.items())

    def _temper(self, step: _Step) -> np.ndarray:
        """Divide rows with late processors by their temperature and run the processors.

        Returns the temperatures that remain to be applied.
        """
        left: np.ndarray = self._temperature[step.rows]
        places = step.places(_LATE)
        if not places:
            return left
        step.logits[places] /= self._tensor(left[places])[:, None]
        left[places] = 1.0
        self._run_processors(step, _LATE, late=True)
        return left

    def _choose(self, step: _Step, union: int, temperature: np.ndarray) -> torch.Tensor:
        """Sample the tokens: [n] int64, on the device."""
        tokens: torch.Tensor
        if not union & _DRAWN:
            tokens = self.ops.argmax(step.logits)
            return tokens
        uniform = self.ops.uniforms(self._seeds[step.rows], step.positions)
        numbers = self._numbers_of(step.rows, temperature, uniform)
        if self._platform.queued:
            heat, *filters, drawn = numbers
            off = (self._top_k, 0), (self._top_p, 1), (self._min_p, 0)
            top_k, top_p, min_p = (
                tensor if (values[step.rows] != neutral).any() else None
                for tensor, (values, neutral) in zip(filters, off, strict=True)
            )
            tokens = self.ops.sample_blind(step.logits, heat, top_k, top_p, min_p, drawn)
        else:
            tokens = self.ops.sample(step.logits, *numbers)
        return tokens

    def _numbers_of(
        self, rows: np.ndarray, temperature: np.ndarray, *more: np.ndarray
    ) -> tuple[torch.Tensor, ...]:
        """Send the arguments of sampling ops, other than logits, to the device."""
        filters = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        return self._staging.send((temperature, *filters, *more))

    def _processed(self, step: _Step, places: list[int], temperature: np.ndarray) -> torch.Tensor:
        """Return logits as used for sampling: [places, vocabulary] fp32."""
        values = step.logits[places]
        drawn = [i for i, index in enumerate(places) if temperature[index] > 0]
        if drawn:
            at = [places[i] for i in drawn]
            numbers = self._numbers_of(step.rows[at], temperature[at])
            values[drawn] = self.ops.filter_logits(values[drawn], *numbers)
        return values

    def _best_of(
        self, step: _Step, places: list[int], values: torch.Tensor, tokens: torch.Tensor
    ) -> list[Best]:
        """Compute top logprobs, grouped by k. values: [places, vocabulary]."""
        ks = self._best[step.rows[places]]
        # Failed rows have no token; their result is discarded.
        tokens = tokens.clamp(min=0)
        distinct = np.unique(ks).tolist()
        if len(distinct) == 1 and len(places) == len(step.rows):
            return [self.best(values, tokens, distinct[0])]
        groups = []
        for k in distinct:
            group = np.flatnonzero(ks == k)
            at = [places[i] for i in group.tolist()]
            chosen = tokens[self._tensor(np.array(at))]
            groups.append(self.best(values[self._tensor(group)], chosen, k, at))
        return groups

    def best(
        self, values: torch.Tensor, tokens: torch.Tensor, k: int, places: Sequence[int] = ()
    ) -> Best:
        """Compute the k best logprobs, or logits, depending on `mode`. k < 0: those of the tokens
        that row -1 - k names.

        values: [n, vocabulary] fp32 logits. tokens: [n], the sampled ones. places: indices to
        report, by default 0 ... n - 1.
        """
        normalise = self.mode.endswith("logprobs")
        top = self.ops.top_logprobs(values, tokens, max(k, 0), normalise)
        if k < 0:
            ids = self._tensor(np.array(self._named[-1 - k])).expand(len(values), -1)
            others = values.gather(1, ids) - values.gather(1, tokens[:, None]) + top[1]
            top = torch.cat((top[0], ids), 1), torch.cat((top[1], others), 1), top[2]
        return Best(places or range(len(values)), self._platform.fetch(top))

    def _commit(self, step: _Step, tokens: np.ndarray) -> None:
        """Append the tokens to rows that keep a history."""
        for i in step.places(_HISTORY):
            index, token = int(step.rows[i]), int(tokens[i])
            row = self._rows[index]
            if row.matcher is not None and not row.matcher.accept(token):
                step.errors[i] = RowFailure(f"the grammar does not accept token {token}", _GRAMMARS)
                continue
            row.output.append(token)
            if row.seen is not None:
                row.seen.add(token)
            if row.constraints and any(each.over(row.output) for each in row.constraints):
                row.constraints = [each for each in row.constraints if not each.over(row.output)]
                if not row.constraints:
                    self._flags[index] &= ~_CONSTRAINED

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return self._staging.send((array,))[0]


def _constrain(row: _RowState, logits: torch.Tensor) -> None:
    """Apply a row's constraints to logits: [vocabulary].

    Once its grammar is finished, a row may end before its minimum length.
    """
    finished = row.matcher is not None and row.matcher.finished
    for constraint in row.constraints:
        if not (finished and isinstance(constraint, MinTokens)):
            constraint.apply(logits, row.output)


def _replayed(grammar: Grammar, output: np.ndarray) -> Matcher:
    """Create a matcher and replay the row's output from before it was preempted."""
    matcher = grammar.matcher()
    for token in output.tolist():
        if not matcher.accept(token):
            raise RequestError(
                f"the grammar does not accept token {token} of the output so far", _GRAMMARS
            )
    return matcher


def _runs(
    firsts: Sequence[int],
    tokens: np.ndarray,
    after: Mapping[tuple[int, int], int],
    logprobs: Mapping[int, RowLogprobs],
    errors: Mapping[int, RowFailure],
) -> Verified:
    """Accept each row's drafts as long as they were sampled, plus the token sampled behind them."""
    accepted = np.zeros(len(firsts), dtype=np.int32)
    sources: list[int] = []
    entries: dict[int, tuple[RowLogprobs, ...]] = {}
    values = tokens.tolist()
    for row, first in enumerate(firsts):
        path: list[int] = []
        index: int | None = first
        # Indices behind a stop token were not sampled. Where sampling failed behind accepted
        # drafts, the row keeps these and fails in its next step.
        while index is not None and values[index] >= 0:
            path.append(index)
            index = after.get((index, values[index]))
        accepted[row] = len(path)
        sources += path
        if first in logprobs:
            entries[row] = tuple(logprobs[index] for index in path)
    failed = {row: errors[first] for row, first in enumerate(firsts) if first in errors}
    chosen = np.array(sources, dtype=np.int64)
    return Verified(tokens[chosen], accepted, entries, failed, sources=chosen)


def _why(logits: torch.Tensor) -> RowFailure:
    """Explain why no token could be sampled from a row of logits."""
    if bool(logits.isnan().any()):
        return RowFailure("the model returned NaN logits for this row")
    if bool(logits.isposinf().any()):
        return RowFailure("the model or a logits processor returned infinite logits for this row")
    return RowFailure(
        "no token can be sampled: the allowed ids, bad words, min_tokens, the logits "
        "processors and the grammar exclude all of them",
        "",
    )
