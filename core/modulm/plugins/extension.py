"""stevedore manager that imports one driver and names its distribution if that fails."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager

from modulm.plugins.calls import broken, importing
from modulm.plugins.declaration import Declaration

__all__ = ["PickedDriver"]


class PickedDriver(DriverManager[Any]):
    """Manager of an entry point that was already selected.

    Its group contains only this entry point, so stevedore imports no other. Raises PluginBroken.
    """

    def __init__(self, picked: Declaration) -> None:
        self._picked = picked
        group = f"modulm.{picked.kind}"
        self._point = EntryPoint(picked.name, picked.target, group)
        try:
            with importing(picked):
                super().__init__(group, picked.name, on_load_failure_callback=self._failed)
        except (AssertionError, SystemExit) as error:  # stevedore lets these two pass
            self._failed(self, self._point, error)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]

    def _failed(self, manager: object, point: EntryPoint, error: BaseException) -> None:
        raise broken(f"{self._picked} cannot be imported from {point.value!r}", error) from error
