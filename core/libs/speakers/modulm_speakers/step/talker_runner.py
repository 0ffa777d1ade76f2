"""The worker's half for a model that speaks beside a text model: rows of both kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import DIRECT, BuiltModel, RanStep
from modulm_speakers.model import CODES, MIXED, STATES, TEXTS
from modulm_speakers.script import GIVEN, Script, state_runs
from modulm_speakers.step.runner import SpeechRunner

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.model import Batch

__all__ = ["TalkerRunner"]


@frozen(eq=False)
class _Inputs:
    """What rows that speak read in a step.

    codes: [tokens, codebooks]. texts: [tokens]. mixed: [tokens], whether a row speaks. states: one
    array [n, width] for each row. positions: [axes, tokens]; None if no row has axes.
    """

    codes: np.ndarray
    texts: np.ndarray
    speaking: np.ndarray
    states: list[np.ndarray]
    axes: dict[int, np.ndarray]


class TalkerRunner(SpeechRunner):
    """Rows with a `Script` speak; others are texts, whose states may be reported."""

    every = True

    def __init__(self, built: BuiltModel) -> None:
        super().__init__(built)
        self._source = self._model.beside_text
        self.layers = (self._source.layer,)
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
        given = inputs.texts == GIVEN
        if given.any():
            states = np.zeros((len(given), self._source.width), dtype=np.float32)
            states[given] = np.concatenate(inputs.states)
            extras[STATES] = self._tensor(states)
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
        inputs = _Inputs(codes, texts, np.zeros(tokens, dtype=np.bool_), [], {})
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
                if script.states is not None:
                    before = int((script.texts[:begin] == GIVEN).sum())
                    here = int((script.texts[known] == GIVEN).sum())
                    inputs.states.append(script.states[before : before + here])
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
                states: torch.Tensor = step.layers[0][self._tensor(chosen.astype(np.int64))]
                report[number] = [done, states.float().cpu().numpy()]
        return report
