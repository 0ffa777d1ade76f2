"""The hook: processors are taken where nothing faster can be, and it is said why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modulm.plugins import Choice, hookimpl

if TYPE_CHECKING:
    from modulm.contracts.platform import Probe

__all__ = ["modulm_choose_platform"]


@hookimpl(trylast=True)
def modulm_choose_platform(probes: Mapping[str, Probe]) -> Choice | None:
    """The CPU, if no other platform that is installed fits this machine."""
    others = {name: probe for name, probe in probes.items() if name != "cpu"}
    if "cpu" not in probes or any(probe.score > 0 for probe in others.values()):
        return None
    reasons = "; ".join(f"{name}: {probe.reason}" for name, probe in others.items())
    return Choice("cpu", f"nothing faster is here: {reasons or 'no other platform is installed'}")
