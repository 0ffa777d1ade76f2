"""Starts and ends replicas that share experts together."""

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
    """The folder through which the ranks of all replicas connect. Each start uses a new one,
    because processes of the previous start may still remove their files.
    """

    def __init__(self) -> None:
        self._folder: str | None = None

    def create_folder(self) -> dict[str, str]:
        """Create a new folder; returns the flags that name it."""
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
    """Wait until all replicas are ready. If one does not start, kill the others and raise its
    error.
    """
    with ThreadPoolExecutor(len(processes)) as pool:
        calls = [pool.submit(reach, index, process) for index, process in enumerate(processes)]
        first = next((one for one in as_completed(calls) if one.exception() is not None), None)
        if first is not None:
            for process in processes:
                process.kill()
    if first is None:
        return [one.result() for one in calls]
    for one in calls:
        if one.exception() is None:
            one.result()[0].close()
    error = first.exception()
    raise error if error is not None else RuntimeError("unreachable")
