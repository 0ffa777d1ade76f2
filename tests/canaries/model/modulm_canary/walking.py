"""A recurrence that takes prompts in segments with `modulm.ops.walk`, as the page of 0.1 says."""

from __future__ import annotations

from modulm.ops.walk import begin, walk

from modulm_canary import CanaryForCausalLM

__all__ = ["WalkingCanaryForCausalLM", "begin", "walk"]


class WalkingCanaryForCausalLM(CanaryForCausalLM):
    api = 1
