"""Hook: choose the CPU if no other platform fits, and report why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modulm.plugins import Choice, hookimpl

if TYPE_CHECKING:
    from modulm.contracts.platform import Probe

__all__ = ["modulm_choose_platform"]


@hookimpl(trylast=True)
def modulm_choose_platform(probes: Mapping[str, Probe]) -> Choice | None:
    """Choose the CPU if no other installed platform fits this machine."""
    others = {name: probe for name, probe in probes.items() if name != "cpu"}
    if "cpu" not in probes or any(probe.score > 0 for probe in others.values()):
        return None
    reasons = "; ".join(f"{name}: {probe.reason}" for name, probe in others.items())
    return Choice("cpu", f"no faster platform: {reasons or 'no other platform is installed'}")
