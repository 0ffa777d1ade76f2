"""The scheduler's half: keeps frames for rows that are preempted, and hands out the sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import define, field

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import PartPlanner, PlannerContext
from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.contracts.executor import PartReport, Plan
    from modulm.contracts.requests import Request
    from modulm.contracts.step_part import WaitingRequest

__all__ = ["SpeechPlanner"]

#: Fields of SamplingParams that concern texts -> the values that a request for sound may have.
_ALLOWED: Mapping[str, Sequence[Any]] = {
    "detokenize": (False,),
    "n": (1,),
    "best_of": (None, 1),
    "stop": (None, (), []),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
}


@define(eq=False)
class _Sound:
    """The sound of a request. frames: [codebooks] each. over: whether its last frame ends it."""

    frames: list[np.ndarray] = field(factory=list)
    over: bool = False


class SpeechPlanner(PartPlanner):
    """Turns prefix reuse off: the names of blocks tell only the first code of each frame."""

    #: Fields that must have certain values -> these values, the one to use first.
    allowed: ClassVar[Mapping[str, Sequence[Any]]] = {**_ALLOWED, "speculative": (0, None)}

    def __init__(self, context: PlannerContext) -> None:
        context.prefixes.enabled = False
        self._codebook_size = int(context.values["codebook_size"])
        self._rows: dict[int, _Sound] = {}
        self._sounds: dict[str, _Sound] = {}
        self._report: Mapping[int, Any] = {}
        self._reported = False

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that expects text."""
        params = request.params
        if not isinstance(params, SamplingParams):
            return
        for name, allowed in self.allowed.items():
            if getattr(params, name) not in allowed:
                raise RequestError(
                    f"{name}: this model answers in sound, not in text: use POST /v1/audio/speech, "
                    f"or offline {name}={allowed[0]} and the answer's arrays",
                    name,
                )
        if any(token < self._codebook_size for token in request.stop_ids()):
            message = "ignore_eos must be true: tokens are codes of sound, and a frame ends it"
            raise RequestError(message, "ignore_eos")

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        self._rows[row] = self._sounds.setdefault(waiting.request.id, _Sound())

    def row_value(self, request: Request) -> np.ndarray | None:
        """Return the frames of a request that was preempted: [frames, codebooks]."""
        sound = self._sounds.get(request.id)
        return np.stack(sound.frames) if sound is not None and sound.frames else None

    def release(self, request: Request, row: int) -> None:
        self._rows.pop(row, None)

    def finished(self, request: str) -> None:
        self._sounds.pop(request, None)

    def receive(self, plan: Plan, report: PartReport) -> None:
        self._report, self._reported = report.value.get("frames", {}), True

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """Keep the frames of rows that still run."""
        report, self._reported = (self._report if self._reported else {}), False
        self._report = {row: report[row] for row in owners.tolist() if row in report}
        for row, (frame, _, over) in self._report.items():
            if (sound := self._rows.get(row)) is not None:
                sound.frames.append(frame)
                sound.over = bool(over)

    def ends(self, row: int) -> bool:
        sound = self._rows.get(row)
        return sound is not None and sound.over

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        return {
            "arrays": {
                names[row]: {"codes": frame[None], "samples": samples}
                for row, (frame, samples, _) in self._report.items()
                if row in names
            }
        }
