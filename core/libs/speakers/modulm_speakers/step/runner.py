"""The worker's half: completes frames, decodes them, and makes them the next tokens' inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, evolve, field

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import BuiltModel, PartRunner, RanStep, RunnerContext
from modulm.engine.sampling.sampler import Sampler
from modulm.errors import EngineError
from modulm_speakers.model import CODES

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.model import Batch

__all__ = ["SpeechRunner"]

#: Key of `SamplingParams.extra_args`: sampling of a frame's other codes, where it differs.
_DEPTH = "depth_sampling"
#: Fields of SamplingParams that apply to all codes of a frame.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: Separates the random numbers of a frame's other codes from those of first codes.
_SEED = 0x5DEECE66D


@define(eq=False)
class _Row:
    """A row that speaks. prompt: its length. most: its frames, unless one ends it before. frames:
    [codebooks] int64 each. state: the codec's.
    """

    prompt: int
    most: int | None = None
    frames: list[np.ndarray] = field(factory=list)
    state: Any = None


class SpeechRunner(PartRunner):
    """Rows whose sound is over give no token in the next step, which ends them."""

    def __init__(self, built: BuiltModel) -> None:
        self._model: Any = built.loaded.model
        self._ops = built.loaded.ops
        self._platform = built.platform
        self._staging = built.platform.staging()
        self._rows: dict[int, _Row] = {}
        self._over: set[int] = set()
        self._sampler: Sampler | None = None
        self._focus: Callable[[Any, Any], None] = lambda rows, positions: None

    @property
    def tokenless(self) -> Collection[int]:  # type: ignore[override]
        return self._over

    def capacity(self) -> Mapping[str, Any]:
        model = self._model
        return {
            "rate": model.rate,
            "frame_samples": model.frame_samples,
            "codebook_size": model.codebook_size,
        }

    def open(self, context: RunnerContext) -> None:
        self._focus = context.focus
        self._sampler = Sampler(
            self._ops, self._platform, vocabulary=self._model.codebook_size, rows=context.rows
        )

    def admit(self, start: RowStart, value: np.ndarray | None) -> None:
        """Start a row. value: its frames, if it was preempted."""
        params = start.params
        if not isinstance(params, SamplingParams) or self._sampler is None:
            return
        row = _Row(len(start.prompt), params.max_tokens)
        row.state = self._model.open_sound(self._voice(start), params.seed)
        if value is not None and len(value):
            row.frames = list(np.asarray(value, dtype=np.int64))
            _, (row.state,) = self._model.decode(
                self._tensor(np.stack(row.frames)[None]), [row.state]
            )
        self._rows[start.row] = row
        extra: Any = params.extra_args or {}
        own = {name: getattr(params, name) for name in _SAMPLING} | (extra.get(_DEPTH) or {})
        seed = None if start.seed is None else start.seed ^ _SEED
        self._sampler.admit(
            evolve(start, output=start.output[:0], seed=seed), SamplingParams(**own)
        )

    def _voice(self, start: RowStart) -> str:
        """The voice of a row's sound."""
        return ""

    def release(self, row: int) -> None:
        self._over.discard(row)
        if self._rows.pop(row, None) is not None and self._sampler is not None:
            self._sampler.release(row)

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        """Add the frames of the step's tokens. Raises EngineError for drafts of first codes."""
        if plan.drafted is not None:
            raise EngineError("speculative decoding is not supported for models that speak")
        codes = np.full((len(batch.tokens), self._model.codebooks), -1, dtype=np.int64)
        at = 0
        for number, begin, count in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            row = self._rows.get(number)
            if row is not None and begin + count > row.prompt:
                first = max(begin, row.prompt)
                frames = row.frames[first - row.prompt : begin + count - row.prompt]
                codes[at + first - begin : at + first - begin + len(frames)] = frames
            at += count
        return evolve(batch, extras={**batch.extras, CODES: self._tensor(codes)})

    def after(self, step: RanStep) -> Mapping[str, Any] | None:
        """Complete and decode the frames of rows with new tokens."""
        plan, numbers = step.plan, [row for row in step.tokens if row in self._rows]
        if not numbers:
            return None
        places = {row: index for index, row in enumerate(plan.rows.tolist())}
        chosen = np.array([places[row] for row in numbers])
        rows = [self._rows[row] for row in numbers]
        first = self._tensor(np.array([int(step.tokens[row][-1]) for row in numbers]))
        hidden = step.hidden[self._tensor(step.lasts[chosen].astype(np.int64))]
        positions = (plan.starts + plan.counts)[chosen].astype(np.int64)
        codes = self._complete(hidden, first, np.array(numbers), positions)
        frames = codes.cpu().numpy()
        over, heard = self._model.ends(frames), self._model.is_heard(frames)
        samples = self._decode(codes, rows, heard)
        report = {}
        for index, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            row.frames.append(frames[index])
            if over[index]:
                self._over.add(number)
            if self._model.flushes and (over[index] or len(row.frames) == row.most):
                rest = self._model.flush(row.state).cpu().numpy()
                samples[index] = np.concatenate([samples[index], rest])
            report[number] = [frames[index], samples[index], number in self._over]
        return {"frames": report}

    def _complete(
        self, hidden: torch.Tensor, first: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        def choose(logits: torch.Tensor, codebook: int) -> torch.Tensor:
            places = positions * self._model.codebooks + codebook
            codes: torch.Tensor = self._sampler.sample(rows, places, logits).device  # type: ignore[union-attr]
            return codes.clamp(min=0)

        self._focus(None, None)
        codes: torch.Tensor = self._model.complete(hidden, first, choose)
        return codes

    def _decode(self, codes: torch.Tensor, rows: list[_Row], heard: np.ndarray) -> list[np.ndarray]:
        """Decode one frame of each row: [samples] float32, none for marks."""
        samples = [np.zeros(0, dtype=np.float32)] * len(rows)
        at = np.flatnonzero(heard)
        if len(at):
            states = [rows[index].state for index in at]
            sound, states = self._model.decode(codes[self._tensor(at), None], states)
            ends = np.cumsum([len(wave) for wave in sound])[:-1]
            waves = np.split(torch.cat(list(sound)).cpu().numpy(), ends)
            for index, wave, state in zip(at.tolist(), waves, states, strict=True):
                samples[index], rows[index].state = wave, state
        return samples

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        sent: torch.Tensor = self._staging.send((array,))[0]
        return sent
