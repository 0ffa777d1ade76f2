"""From logits to tokens: what each row asked for, in the order that vLLM documents.

grammar mask, allowed ids, bad words, minimum length, bias, processors, penalties, temperature,
processors that keep the argmax, min-p, top-k, top-p, draw, logprobs. What a row needs is decided
when it is admitted and kept as flags, so a step in which every row is plain greedy is one argmax.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from attrs import define, field, frozen

from modulm.contracts.executor import RowLogprobs, RowStart
from modulm.contracts.grammar import Grammar, Matcher
from modulm.contracts.kernels import Ops
from modulm.contracts.sampling import RowView, SamplingParams
from modulm.engine.sampling.logit_constraints import LogitConstraint, MinTokens, edits_for
from modulm.engine.sampling.logits_processors import Processors
from modulm.engine.sampling.penalties import Seen, penalise, wants_penalties

__all__ = ["Sampled", "Sampler"]

#: CPU time that one row's grammar may take in one step before the row is given up for the others.
_GRAMMAR_SECONDS = 0.5

_DRAWN, _LOGPROBS, _EDITED, _PENALISED, _GRAMMAR, _EARLY, _LATE = (1 << i for i in range(7))
_HISTORY = _EDITED | _PENALISED | _GRAMMAR | _EARLY | _LATE
_CHANGED = _EDITED | _PENALISED | _EARLY | _LATE


@frozen(eq=False)
class Sampled:
    """tokens: [n] int64, -1 where the row failed; logprobs and errors by row."""

    tokens: np.ndarray
    logprobs: Mapping[int, RowLogprobs] = field(factory=dict)
    errors: Mapping[int, str] = field(factory=dict)


@define(eq=False)
class _Row:
    """What the sampler keeps of a row that is more than numbers."""

    view: RowView
    output: list[int]
    edits: list[LogitConstraint]
    seen: Seen | None
    matcher: Matcher | None

    def fill(self, mask: np.ndarray) -> None:
        """mask: [ceil(vocabulary / 32)] int32, of the tokens that the grammar allows next."""
        if self.matcher is not None:
            self.matcher.fill(mask)


@define(eq=False)
class _Step:
    """One call of `sample`: places are indices into the step's sampling rows."""

    rows: list[int]
    flags: np.ndarray
    logits: torch.Tensor
    positions: np.ndarray
    errors: dict[int, str] = field(factory=dict)

    def places(self, flag: int) -> list[int]:
        """The places whose rows have `flag` and have not failed."""
        found = np.flatnonzero(self.flags & flag).tolist()
        return [place for place in found if place not in self.errors]


class Sampler:
    """Holds the sampling state of all rows and chooses their next tokens.

    rows: how many rows there can be. mode: of `--logprobs-mode`. ops: bound sampling ops.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        vocabulary: int,
        rows: int,
        device: torch.device,
        mode: str = "raw_logprobs",
        processors: Processors | None = None,
    ) -> None:
        self.ops = ops
        self.vocabulary = vocabulary
        self.device = device
        self.mode = mode
        self.processors = processors or Processors()
        self._rows: dict[int, _Row] = {}
        self._flags = np.zeros(rows, dtype=np.int32)
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_k = np.zeros(rows, dtype=np.int32)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._min_p = np.zeros(rows, dtype=np.float32)
        self._seeds = np.zeros(rows, dtype=np.int64)
        self._best = np.zeros(rows, dtype=np.int32)

    def admit(
        self, start: RowStart, params: SamplingParams, grammar: Grammar | None = None
    ) -> None:
        """A row starts. Whatever its grammar or a processor raises is the row's error."""
        row = start.row
        flags = self._numbers(row, start, params)
        output = [int(token) for token in start.output]
        view = RowView(row, params, start.prompt.tolist() if self.processors.all else (), output)
        edits = edits_for(start, params, self.device)
        penalised = wants_penalties(params)
        seen = Seen(params, start.prompt, output, self.vocabulary) if penalised else None
        matcher = None if grammar is None else _replayed(grammar, start.output)
        early, late = self.processors.admit(view)
        flags |= _EDITED * bool(edits) | _PENALISED * penalised | _GRAMMAR * (matcher is not None)
        flags |= _EARLY * early | _LATE * (late and not params.greedy)
        if flags & _HISTORY:
            self._rows[row] = _Row(view, output, edits, seen, matcher)
        self._flags[row] = flags

    def _numbers(self, row: int, start: RowStart, params: SamplingParams) -> int:
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._top_k[row] = min(max(params.top_k, 0), self.vocabulary)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = _signed(start.seed or 0)
        best = params.logprobs
        self._best[row] = self.vocabulary if best == -1 else best or 0
        return _DRAWN * (not params.greedy) | _LOGPROBS * (best is not None)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._flags[row] = 0
        self._rows.pop(row, None)
        self.processors.release(row)

    def sample(self, rows: np.ndarray, positions: np.ndarray, logits: torch.Tensor) -> Sampled:
        """rows, positions: [n], the position that each row's new token will have; logits:
        [n, vocabulary], which may be overwritten."""
        flags = self._flags[rows]
        union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        if union == 0:
            tokens = self.ops.argmax(logits).cpu().numpy()
            if tokens.min() >= 0:
                return Sampled(tokens)
            return Sampled(tokens, errors=self._failures(rows.tolist(), tokens, logits))
        step = _Step(rows.tolist(), flags, logits.float(), positions)
        if union & _GRAMMAR:
            self._mask(step)
        wanted = step.places(_LOGPROBS)
        values = self._raw(step, union, wanted) if wanted and self.mode.startswith("raw") else None
        self._process(step, union)
        temperature = self._temper(step) if union & _LATE else self._temperature[rows]
        if wanted and values is None:
            values = self._processed(step, wanted, temperature)
        tokens = self._choose(step, union, temperature)
        step.errors = self._failed_places(tokens, logits) | step.errors
        self._commit(step, union, tokens)
        tokens[list(step.errors)] = -1
        logprobs = {} if values is None else self._logprobs(step, wanted, values, tokens)
        errors = {step.rows[place]: words for place, words in step.errors.items()}
        return Sampled(tokens, logprobs, errors)

    def _mask(self, step: _Step) -> None:
        """Apply the grammars' bit masks."""
        places = step.places(_GRAMMAR)
        masks = np.zeros((len(places), -(-self.vocabulary // 32)), dtype=np.int32)
        for place, mask in zip(places, masks, strict=True):
            began = time.thread_time()
            try:
                self._rows[step.rows[place]].fill(mask)
            except Exception as error:
                step.errors[place] = f"the grammar failed: {error}"[:300]
            if time.thread_time() - began > _GRAMMAR_SECONDS:
                step.errors[place] = "the grammar is too ambiguous: a token took too long to check"
        at = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.ops.apply_bitmask(step.logits, at, torch.from_numpy(masks).to(self.device))

    def _raw(self, step: _Step, union: int, places: list[int]) -> torch.Tensor:
        """Logits before they are changed: [places, vocabulary]; the step's own if nothing will."""
        whole = len(places) == len(step.rows) and not union & _CHANGED
        return step.logits if whole else step.logits[places]

    def _process(self, step: _Step, union: int) -> None:
        """Edits, early processors and penalties."""
        for place in step.places(_EDITED):
            try:
                _edit(self._rows[step.rows[place]], step.logits[place])
            except Exception as error:
                step.errors[place] = f"the logits could not be edited: {error}"[:300]
        if union & _EARLY:
            self._run_processors(step, _EARLY, late=False)
        if union & _PENALISED:
            places = step.places(_PENALISED)
            rows = [self._rows[step.rows[place]].seen for place in places]
            seen = [row for row in rows if row is not None]
            if seen:
                penalise(self.ops, step.logits, places, seen)

    def _run_processors(self, step: _Step, flag: int, *, late: bool) -> None:
        views = {place: self._rows[step.rows[place]].view for place in step.places(flag)}
        step.errors.update(self.processors.apply(views, step.logits, late=late))

    def _temper(self, step: _Step) -> np.ndarray:
        """Divide rows with late processors by their temperature and run these; what is left."""
        left = self._temperature[step.rows]
        places = step.places(_LATE)
        if not places:
            return left
        step.logits[places] /= self._tensor(left[places])[:, None]
        left[places] = 1.0
        self._run_processors(step, _LATE, late=True)
        return left

    def _choose(self, step: _Step, union: int, temperature: np.ndarray) -> np.ndarray:
        if not union & _DRAWN:
            chosen: np.ndarray = self.ops.argmax(step.logits).cpu().numpy()
            return chosen
        rows = step.rows
        uniform = self.ops.uniforms(self._seeds[rows], step.positions)
        tokens: np.ndarray = (
            self.ops.sample(
                step.logits,
                self._tensor(temperature),
                self._tensor(self._top_k[rows]),
                self._tensor(self._top_p[rows]),
                self._tensor(self._min_p[rows]),
                self._tensor(uniform),
            )
            .cpu()
            .numpy()
        )
        return tokens

    def _processed(self, step: _Step, places: list[int], temperature: np.ndarray) -> torch.Tensor:
        """Logits after everything that is done before the draw: [places, vocabulary] fp32."""
        values = step.logits[places]
        drawn = [i for i, place in enumerate(places) if temperature[place] > 0]
        if drawn:
            at = [places[i] for i in drawn]
            rows = [step.rows[place] for place in at]
            values[drawn] = self.ops.filter_logits(
                values[drawn],
                self._tensor(temperature[at]),
                self._tensor(self._top_k[rows]),
                self._tensor(self._top_p[rows]),
                self._tensor(self._min_p[rows]),
            )
        return values

    def _logprobs(
        self, step: _Step, places: list[int], values: torch.Tensor, tokens: np.ndarray
    ) -> dict[int, RowLogprobs]:
        """Rows that ask for as many tokens are gathered together."""
        found = {}
        best = self._best[step.rows]
        kept = [(i, place) for i, place in enumerate(places) if place not in step.errors]
        for k in sorted({int(best[place]) for _, place in kept}):
            some = [(i, place) for i, place in kept if best[place] == k]
            at = [place for _, place in some]
            entries = self.gather(values[[i for i, _ in some]], tokens[at], k)
            for place, entry in zip(at, entries, strict=True):
                found[step.rows[place]] = entry
        return found

    def gather(self, values: torch.Tensor, tokens: np.ndarray, k: int) -> list[RowLogprobs]:
        """values: [n, vocabulary] fp32 logits; tokens: [n] -> in the terms of `mode`."""
        normalise = self.mode.endswith("logprobs")
        ids, best, rank = self.ops.top_logprobs(values, self._tensor(tokens), k, normalise)
        arrays = zip(ids.cpu().numpy(), best.cpu().numpy(), rank.tolist(), strict=True)
        return [RowLogprobs(ids=i, values=v, rank=r) for i, v, r in arrays]

    def _commit(self, step: _Step, union: int, tokens: np.ndarray) -> None:
        """Tell the rows that keep a history what they produced."""
        if not union & _HISTORY:
            return
        for place in step.places(_HISTORY):
            row, token = self._rows[step.rows[place]], int(tokens[place])
            if row.matcher is not None and not row.matcher.accept(token):
                step.errors[place] = f"the grammar does not accept token {token}"
                continue
            row.output.append(token)
            if row.seen is not None:
                row.seen.add(token)
            if row.edits and any(edit.over(row.output) for edit in row.edits):
                self._drop_edits(step.rows[place], row)

    def _drop_edits(self, index: int, row: _Row) -> None:
        row.edits = [edit for edit in row.edits if not edit.over(row.output)]
        if not row.edits:
            self._flags[index] &= ~_EDITED

    def _failed_places(self, tokens: np.ndarray, logits: torch.Tensor) -> dict[int, str]:
        places = np.flatnonzero(tokens < 0).tolist()
        return {place: _why(logits[place]) for place in places}

    def _failures(
        self, rows: list[int], tokens: np.ndarray, logits: torch.Tensor
    ) -> dict[int, str]:
        failed = self._failed_places(tokens, logits)
        return {rows[place]: words for place, words in failed.items()}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        # A copy: the arrays of a request belong to it, and some cannot be written to.
        return torch.from_numpy(np.array(array)).to(self.device)


def _edit(row: _Row, logits: torch.Tensor) -> None:
    """logits: [vocabulary]. Once its grammar is finished, a row may end before its minimum."""
    finished = row.matcher is not None and row.matcher.finished
    for edit in row.edits:
        if not (finished and isinstance(edit, MinTokens)):
            edit.apply(logits, row.output)


def _replayed(grammar: Grammar, output: np.ndarray) -> Matcher:
    """A matcher that has taken what the row produced before it was preempted."""
    matcher = grammar.matcher()
    for token in output.tolist():
        if not matcher.accept(token):
            raise ValueError(f"the grammar does not accept token {token} of the output so far")
    return matcher


def _signed(seed: int) -> int:
    """Any integer as the int64 with the same low bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _why(logits: torch.Tensor) -> str:
    """What is wrong with a row of logits from which nothing could be chosen."""
    if bool(logits.isnan().any()):
        return "the model gave NaN logits for this row"
    if bool(logits.isposinf().any()):
        return "the model or a logits processor gave infinite logits for this row"
    return (
        "no token is left to choose from: the allowed ids, bad words, min_tokens, the logits "
        "processors and the grammar exclude all of them"
    )
