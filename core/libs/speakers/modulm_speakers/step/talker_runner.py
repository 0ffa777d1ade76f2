"""The worker's half for a model that speaks beside a text model: rows of both kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import DIRECT, BuiltModel, RanStep
from modulm_speakers.model import CODES, GIVEN, MIXED, STATES, TEXTS
from modulm_speakers.script import Script, state_runs
from modulm_speakers.step.runner import SpeechRunner

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.model import Batch

__all__ = ["TalkerRunner"]


@frozen(eq=False)
class _Inputs:
    """What rows that speak read in a step.

    codes: [tokens, codebooks]. texts: [tokens]. speaking, given: [tokens], whether a row speaks and
    whether a token has a state. states: of those, [n, width] for each row. axes: first token of a
    row with positions by axis -> [axes, tokens of the row].
    """

    codes: np.ndarray
    texts: np.ndarray
    speaking: np.ndarray
    given: np.ndarray
    states: list[np.ndarray] = field(factory=list)
    axes: dict[int, np.ndarray] = field(factory=dict)


class TalkerRunner(SpeechRunner):
    """Rows with a `Script` speak; others are texts, whose states may be reported."""

    every = True

    def __init__(self, built: BuiltModel) -> None:
        super().__init__(built)
        self._source = self._model.beside_text
        layer = self._source.layer
        self.layers = () if layer is None else (layer,)
        self._scripts: dict[int, Script] = {}
        self._wanted: dict[int, Sequence[tuple[int, int]]] = {}

    def capacity(self) -> Mapping[str, Any]:
        model = self._model
        return {
            **super().capacity(),
            "texts": model.config.vocab_size,
            "codes": model.first_codes,
            "state_width": self._source.width,
        }

    def admit(self, start: RowStart, value: np.ndarray | None) -> None:
        script = Script.of(start.params)
        if script is not None:
            self._scripts[start.row] = script
            super().admit(start, value)
        elif isinstance(start.params, SamplingParams) and (runs := state_runs(start.params)):
            self._wanted[start.row] = runs

    def _voice(self, start: RowStart) -> str:
        return self._scripts[start.row].voice

    def release(self, row: int) -> None:
        self._scripts.pop(row, None)
        self._wanted.pop(row, None)
        super().release(row)

    def recording(self, plan: Plan) -> str | None:
        """Steps with rows that speak run the layers of two models: they are not recorded."""
        speaks = any(row in self._rows for row in plan.rows.tolist())
        return DIRECT if speaks else None

    def focus(self, rows: np.ndarray | None, positions: np.ndarray | None) -> None:
        speaking = None
        if rows is not None and self._rows:
            speaking = np.isin(rows, list(self._rows))
        self._model.focus(None if speaking is None or not speaking.any() else speaking)

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        if not any(row in self._rows for row in plan.rows.tolist()):
            return batch
        inputs = self._inputs(plan, len(batch.tokens))
        extras = {CODES: self._tensor(inputs.codes), TEXTS: self._tensor(inputs.texts)}
        if not inputs.speaking.all():
            extras[MIXED] = self._tensor(inputs.speaking)
        if inputs.states:
            states = np.zeros((len(inputs.given), self._source.width), dtype=np.float32)
            states[inputs.given] = np.concatenate(inputs.states)
            extras |= {STATES: self._tensor(states), GIVEN: self._tensor(inputs.given)}
        amended = evolve(batch, extras={**batch.extras, **extras})
        return self._turn(amended, inputs.axes) if inputs.axes else amended

    def _turn(self, batch: Batch, axes: Mapping[int, np.ndarray]) -> Batch:
        """Set the positions of rows that have several axes. axes: by the first token."""
        at = batch.axis_positions
        if at is None:
            at = batch.positions.expand(len(next(iter(axes.values()))), -1)
        at = at.clone()
        for first, positions in axes.items():
            at[:, first : first + positions.shape[1]] = self._tensor(positions)
        return evolve(batch, axis_positions=at)

    def _inputs(self, plan: Plan, tokens: int) -> _Inputs:
        codes = np.full((tokens, self._model.codebooks), -1, dtype=np.int64)
        texts = np.full(tokens, -1, dtype=np.int64)
        speaking, given = np.zeros((2, tokens), dtype=np.bool_)
        inputs = _Inputs(codes, texts, speaking, given)
        first = 0
        for number, begin, count in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            row, script = self._rows.get(number), self._scripts.get(number)
            if row is not None and script is not None:
                inputs.speaking[first : first + count] = True
                whole = np.arange(begin, begin + count)
                known = whole[whole < len(script.texts)]
                texts[first : first + count] = script.padding
                texts[first : first + len(known)] = script.texts[known]
                asked = whole[whole < row.prompt]
                codes[first : first + len(asked), 0] = script.codes[asked]
                said = row.frames[begin + len(asked) - row.prompt : begin + count - row.prompt]
                if len(asked) < count and said:
                    codes[first + len(asked) : first + len(asked) + len(said)] = said
                if script.given is not None and script.states is not None:
                    places = np.searchsorted(script.given, (begin, begin + count))
                    here = slice(*places.tolist())
                    inputs.given[first + script.given[here] - begin] = True
                    inputs.states.append(script.states[here])
                if script.positions is not None:
                    turned = np.tile(whole + script.offset, (len(script.positions), 1))
                    turned[:, : len(asked)] = script.positions[:, asked]
                    inputs.axes[first] = turned
            first += count
        return inputs

    def after(self, step: RanStep) -> Mapping[str, Any] | None:
        states = self._states(step) if self._wanted else {}
        report = super().after(step) or {}
        return {**report, **({"states": states} if states else {})} or None

    def _states(self, step: RanStep) -> Mapping[int, Any]:
        """Return [first wanted position, states] of rows whose wanted tokens were computed."""
        plan, ends = step.plan, np.cumsum(step.plan.counts)
        report = {}
        for number, begin, count, end in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), ends.tolist(),
            strict=True,
        ):  # fmt: skip
            done, places = 0, []
            for start, stop in self._wanted.get(number, ()):
                done += max(min(stop, begin) - start, 0)
                here = np.arange(max(start, begin), min(stop, begin + count))
                places.append(here - begin + end - count)
            chosen = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
            if len(chosen):
                source = step.layers[0] if self.layers else step.hidden
                states: torch.Tensor = source[self._tensor(chosen.astype(np.int64))]
                report[number] = [done, states.float().cpu().numpy()]
        return report
