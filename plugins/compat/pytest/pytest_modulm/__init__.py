"""Fixtures of pytest for authors of modulm plugins; see docs/testing-plugins.md."""

from pytest_modulm.faults import Faults
from pytest_modulm.installation import Installation
from pytest_modulm.kits import KitRunner

__all__ = ["Faults", "Installation", "KitRunner"]
