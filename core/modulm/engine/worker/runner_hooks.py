"""Methods of step parts that the runner calls, resolved once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.step_part import PartRunner, overridden

__all__ = ["RunnerHooks"]


class RunnerHooks:
    """For each method of `PartRunner`, the bound methods of the runners that override it.

    Methods with values are paired with the part's name. The attributes `layers`, `drafts`, `ahead`
    and `every` are combined over all runners.
    """

    def __init__(self, parts: Mapping[str, PartRunner]) -> None:
        runners = tuple(parts.values())
        self.release = overridden(runners, "release")
        self.recording = overridden(runners, "recording")
        self.watch = overridden(runners, "watch")
        self.focus = overridden(runners, "focus")
        self.vary = overridden(runners, "vary")
        self.amend_layout = overridden(runners, "amend_layout")
        self.amend_batch = overridden(runners, "amend_batch")
        self.width = overridden(runners, "width")
        self.verify = overridden(runners, "verify")
        self.grammar = overridden(runners, "grammar")
        self.prepare = _named(parts, "prepare")
        self.admit = _named(parts, "admit")
        self.begin = _named(parts, "begin")
        self.collect = _named(parts, "collect")
        self.after = _named(parts, "after")
        self.follow = _named(parts, "follow")
        self.report = _named(parts, "report")
        self.tokenless = tuple(r for r in runners if type(r).tokenless or "tokenless" in vars(r))
        self.layers = tuple(layer for runner in runners for layer in runner.layers)
        # Whether a part reads the hidden states of all tokens, or the batch's shape at each layer.
        after = overridden([runner for runner in runners if not runner.sampled_only], "after")
        self.reads = any((self.collect, after, self.watch, self.focus, self.layers))
        self.drafts = max((runner.drafts for runner in runners), default=0)
        self.ahead = max((runner.ahead for runner in runners), default=0)
        self.every = any(runner.every for runner in runners)


def _named(parts: Mapping[str, PartRunner], method: str) -> tuple[tuple[str, Any], ...]:
    named = [(name, overridden((runner,), method)) for name, runner in parts.items()]
    return tuple((name, methods[0]) for name, methods in named if methods)
