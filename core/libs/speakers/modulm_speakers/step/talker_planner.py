"""The scheduler's half for a model that speaks beside a text model: rows of both kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import PlannerContext
from modulm.errors import RequestError
from modulm_speakers.script import Script, state_runs
from modulm_speakers.step.planner import SpeechPlanner

if TYPE_CHECKING:
    from modulm.contracts.executor import PartReport, Plan
    from modulm.contracts.requests import Request
    from modulm.contracts.step_part import WaitingRequest

__all__ = ["TalkerPlanner"]


class TalkerPlanner(SpeechPlanner):
    """Rows that speak, and those whose states are wanted, share no prefixes: they need a salt.

    Rows of texts may have drafts, so those that speak must say that they have none.
    """

    allowed: ClassVar[Mapping[str, Sequence[Any]]] = {**SpeechPlanner.allowed, "speculative": (0,)}

    def __init__(self, context: PlannerContext) -> None:
        enabled = context.prefixes.enabled
        super().__init__(context)
        context.prefixes.enabled = enabled
        values = context.values
        self._sizes = {"texts": values["texts"], "codes": values["codes"]}
        self._width = int(values["state_width"])
        #: Request -> how many of its wanted states were handed out.
        self._given: dict[str, int] = {}
        self._states: Mapping[int, Any] = {}

    def check(self, request: Request) -> None:
        params = request.params
        if not isinstance(params, SamplingParams):
            return
        script = Script.check(params, request.prompt_len, **self._sizes, width=self._width)
        runs = state_runs(params)
        if runs and params.speculative != 0:
            raise RequestError("speculative: must be 0 for states of tokens", "speculative")
        if (script is not None or runs) and request.salt is None:
            raise RequestError("cache_salt: needed, because no prefix is shared", "cache_salt")
        if script is not None:
            if request.adapter is not None:
                message = f"not supported yet: adapters ({request.adapter}) of a talker"
                raise RequestError(message, "model")
            super().check(request)

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        if Script.of(waiting.request.params) is not None:
            super().admit(waiting, row)

    def finished(self, request: str) -> None:
        self._given.pop(request, None)
        super().finished(request)

    def receive(self, plan: Plan, report: PartReport) -> None:
        super().receive(plan, report)
        self._states = report.value.get("states", {})

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        arrays = dict(super().events(names)["arrays"])
        states, self._states = self._states, {}
        for row, (first, values) in states.items():
            name = names.get(row, "")
            new = values[max(self._given.get(name, 0) - first, 0) :]
            if name and len(new):
                self._given[name] = first + len(values)
                arrays[name] = {"states": np.asarray(new)}
        return {"arrays": arrays}
