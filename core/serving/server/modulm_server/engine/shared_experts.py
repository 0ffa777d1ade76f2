"""Replicas that share experts: they begin together, and none lives without the others."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Event

    from modulm_server.engine.process_client import ProcessCoreClient
    from modulm_server.engine.spawn import EngineProcess

__all__ = ["SharedExperts", "reach_all"]

T = TypeVar("T")


class SharedExperts:
    """Where the ranks of all replicas find one another: another folder each time they begin, as
    what is left of ended ones may still remove theirs.
    """

    def __init__(self) -> None:
        self._folder: str | None = None

    def begun(self) -> dict[str, str]:
        """A new folder, as what replicas are told of it."""
        self.close()
        self._folder = tempfile.mkdtemp(prefix="modulm-replicas-")
        return {"data_parallel_group": self._folder}

    def close(self) -> None:
        """Remove the folder; may be called twice."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def reach_all(
    reach: Callable[[int, EngineProcess], tuple[ProcessCoreClient, Event]],
    processes: Sequence[EngineProcess],
) -> list[tuple[ProcessCoreClient, Event]]:
    """Wait for all replicas at once, as each waits for the others. Where one does not start the
    others are ended, and what was wrong with it is raised.
    """
    with ThreadPoolExecutor(len(processes)) as pool:
        asked = [pool.submit(reach, place, process) for place, process in enumerate(processes)]
        first = next((one for one in as_completed(asked) if one.exception() is not None), None)
        if first is not None:
            for process in processes:
                process.kill()
    if first is None:
        return [one.result() for one in asked]
    for one in asked:
        if one.exception() is None:
            one.result()[0].close()
    error = first.exception()
    raise error if error is not None else RuntimeError("unreachable")
