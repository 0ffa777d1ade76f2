"""Methods of step parts that the scheduler calls, resolved once."""

from __future__ import annotations

from collections.abc import Mapping

from modulm.contracts.step_part import PartPlanner, overridden

__all__ = ["PlannerHooks"]


class PlannerHooks:
    """For each method of `PartPlanner`, the bound methods of the planners that override it."""

    def __init__(self, planners: Mapping[str, PartPlanner]) -> None:
        halves = tuple(planners.values())
        # Requests.
        self.check = overridden(halves, "check")
        self.defers = overridden(halves, "defers")
        self.external = overridden(halves, "external")
        self.load = overridden(halves, "load")
        self.loaded = overridden(halves, "loaded")
        self.limit = overridden(halves, "limit")
        self.waits_in_row = overridden(halves, "waits_in_row")
        self.admit = overridden(halves, "admit")
        self.joined = overridden(halves, "joined")
        self.release = overridden(halves, "release")
        self.finished = overridden(halves, "finished")
        # Steps.
        self.begin = overridden(halves, "begin")
        self.claim = overridden(halves, "claim")
        self.cut = overridden(halves, "cut")
        self.sampled = overridden(halves, "sampled")
        self.settle = overridden(halves, "settle")
        self.ends = overridden(halves, "ends")
        self.events = overridden(halves, "events")
        self.fail = overridden(halves, "fail")
        self.forget = overridden(halves, "forget")
        # With the part's name, under which its values are sent.
        named = [(name, overridden((half,), "plan")) for name, half in planners.items()]
        self.plan = tuple((name, methods[0]) for name, methods in named if methods)
        named = [(name, overridden((half,), "row_value")) for name, half in planners.items()]
        self.row_value = tuple((name, methods[0]) for name, methods in named if methods)
