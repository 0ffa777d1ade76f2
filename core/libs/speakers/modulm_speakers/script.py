"""What rows read that speak beside a text model, in `SamplingParams.extra_args`.

A row of sound needs no tokens of the text model: its prompt is any token, repeated, and its script
says what stands at each position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import attrs
import numpy as np
from attrs import frozen

from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.errors import RequestError

__all__ = ["NONE", "Script", "state_runs", "states_wanted"]

#: No text token, or no code, at a position.
NONE = -1
_SCRIPT, _RUNS = "speech_script", "speech_states"
_AXES = 3


@frozen(eq=False, kw_only=True)
class Script:
    """The script of a row.

    texts: [n] int64, the text token of each position, or `NONE`: of the prompt, then of each frame.
    padding: the text token of frames after those. codes: [prompt] int64, the first code of each
    position of the prompt, or `NONE`. given: [m] int64, positions that have a state of the text
    model, in order; states: [m, width] float32. positions: [axes, prompt] int64 if they differ by
    axis; a later token's position is its index + offset. voice: for `SpeakingModel.open_sound`.
    """

    texts: np.ndarray
    padding: int
    codes: np.ndarray
    given: np.ndarray | None = None
    states: np.ndarray | None = None
    positions: np.ndarray | None = None
    offset: int = 0
    voice: str = ""

    def arguments(self) -> Mapping[str, Any]:
        """Return the entry of `extra_args`."""
        return {_SCRIPT: attrs.asdict(self, recurse=False)}

    @classmethod
    def of(cls, params: SamplingParams | PoolingParams) -> Self | None:
        """Return the script of a request that passed `check`, or None."""
        extra = params.extra_args if isinstance(params, SamplingParams) else None
        table: Any = (extra or {}).get(_SCRIPT)
        return None if table is None else cls(**table)

    @classmethod
    def check(
        cls, params: SamplingParams, prompt: int, *, texts: int, codes: int, width: int
    ) -> Self | None:
        """Read and check a request's script. Raises RequestError.

        prompt: number of its tokens. texts, codes: sizes of both vocabularies. width: of a state.
        """
        try:
            script = cls.of(params)
        except TypeError as error:
            raise RequestError(f"{_SCRIPT}: {error}", _SCRIPT) from error
        if script is None:
            return None
        states, positions, given = script.states, script.positions, script.given
        if given is not None:
            order = _ids(given, "given", 0, len(_ids(script.texts, "texts", NONE, texts)))
            if (np.diff(order) < 1).any():
                raise RequestError(f"{_SCRIPT}: given: must be in order", _SCRIPT)
        fits = {
            "texts": len(_ids(script.texts, "texts", NONE, texts)) >= prompt,
            "voice": isinstance(script.voice, str),
            "padding": isinstance(script.padding, int) and 0 <= script.padding < texts,
            "codes": len(_ids(script.codes, "codes", NONE, codes)) == prompt,
            "states": _shape(states) == (None if given is None else (len(given), width)),
            "positions": positions is None or _shape(positions) == (_AXES, prompt),
            "offset": isinstance(script.offset, int) and abs(script.offset) <= prompt,
        }
        if positions is not None and fits["positions"]:
            _ids(positions.ravel(), "positions", 0, prompt)
        for name, fit in fits.items():
            if not fit:
                raise RequestError(f"{_SCRIPT}: {name} does not fit the prompt", _SCRIPT)
        return script


def _shape(array: Any) -> tuple[int, ...] | None:
    return array.shape if isinstance(array, np.ndarray) else None


def _ids(array: Any, name: str, least: int, end: int) -> np.ndarray:
    """Return an array of int64 that holds `least` to `end` - 1. Raises RequestError."""
    if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.ndim != 1:
        raise RequestError(f"{_SCRIPT}: {name}: must be an array of int64", _SCRIPT)
    if len(array) and not (least <= array.min() and array.max() < end):
        raise RequestError(f"{_SCRIPT}: {name}: must be from {least} to {end - 1}", _SCRIPT)
    return array


def states_wanted(runs: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
    """Return the entry of `extra_args` of a text whose states the answer's sound needs.

    runs: ranges [start, end) of its tokens; `CompletionOutput.arrays["states"]` has those of tokens
    that were computed, one after the other: [n, width] float32.
    """
    return {_RUNS: [list(run) for run in runs]}


def state_runs(params: SamplingParams | PoolingParams) -> Sequence[tuple[int, int]]:
    """Return the ranges of `states_wanted`. Raises RequestError."""
    extra = params.extra_args if isinstance(params, SamplingParams) else None
    runs: Any = (extra or {}).get(_RUNS, ())
    if not isinstance(runs, list | tuple) or not all(_is_run(run) for run in runs):
        raise RequestError(f"{_RUNS}: must be ranges of tokens, in order", _RUNS)
    if any(first[1] > second[0] for first, second in pairwise(runs)):
        raise RequestError(f"{_RUNS}: must be ranges of tokens, in order", _RUNS)
    return [(start, end) for start, end in runs]


def _is_run(run: Any) -> bool:
    whole = isinstance(run, list | tuple) and len(run) == 2 and {*map(type, run)} == {int}
    return whole and 0 <= run[0] < run[1]
