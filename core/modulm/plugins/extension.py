"""stevedore's manager of one driver: imports it, and says whose it is if that fails."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager

from modulm.errors import PluginBroken
from modulm.plugins.declaration import Declaration
from modulm.plugins.moved import new_home

__all__ = ["PickedDriver"]


class PickedDriver(DriverManager[Any]):
    """The manager of an entry point that was picked already: allowed, and the only one of its name.

    Its group holds this one point, so stevedore reads no other and imports no other. Raises
    PluginBroken.
    """

    def __init__(self, picked: Declaration) -> None:
        self._picked = picked
        group = f"modulm.{picked.kind}"
        self._point = EntryPoint(picked.name, picked.target, group)
        try:
            super().__init__(group, picked.name, on_load_failure_callback=self._failed)
        except (AssertionError, SystemExit) as error:  # stevedore lets these two pass
            self._failed(self, self._point, error)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]

    def _failed(self, manager: object, point: EntryPoint, error: BaseException) -> None:
        raise PluginBroken(
            f"{self._picked} cannot be imported from {point.value!r}: "
            f"{type(error).__name__}: {error}{new_home(error)}"
        ) from error
