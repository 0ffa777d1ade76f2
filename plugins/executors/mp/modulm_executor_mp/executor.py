"""Run workers as processes on this machine, which end with this process."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from modulm.config.environ import isolated
from modulm.errors import EngineError
from modulm_distributed.executor import WorkersExecutor
from modulm_distributed.flags import DistributedConfig
from modulm_distributed.mesh import RankSpec
from modulm_distributed.stream import FrameStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.config import EngineConfig

__all__ = ["MpExecutor"]


#: Seconds that a process may be stopped, for example while a debugger attaches.
_STOPPED = 1.0


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal. False where /proc does not exist."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[:1] == ["T"]


class MpExecutor(WorkersExecutor):
    """One process for each rank, all on this machine."""

    name: ClassVar[str] = "mp"
    api: ClassVar[int | tuple[int, int]] = 3

    def __init__(self) -> None:
        super().__init__()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder: str | None = None
        #: Ranks whose processes are stopped, and since when (monotonic seconds).
        self._stopped: dict[int, float] = {}

    def connect(self, config: EngineConfig) -> Sequence[tuple[FrameStream, RankSpec]]:
        parallel = config.parallel
        self._folder = parallel.data_parallel_group or tempfile.mkdtemp(prefix="modulm-ranks-")
        seconds = config.group(DistributedConfig).distributed_timeout_seconds
        store = f"file:{Path(self._folder) / 'store'}-{parallel.data_parallel_rank_local}"
        specs = RankSpec.all_ranks(parallel, store, seconds=seconds)
        connected: list[tuple[FrameStream, RankSpec]] = []
        try:
            connected.extend((self._spawn(), spec) for spec in specs)
        except OSError as error:
            for stream, _ in connected:
                stream.close()
            for process in self._processes:
                process.kill()
            raise EngineError(
                f"only {len(connected)} of {len(specs)} processes of ranks can be started: "
                f"{error.strerror}"
            ) from error
        return connected

    def _spawn(self) -> FrameStream:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "modulm_distributed.worker_process"]
            try:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), *filter(None, (self._folder,))],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=isolated(),
                )
            except BaseException:
                ours.close()
                raise
        self._processes.append(process)
        return FrameStream(ours)

    def ending(self, rank: int) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(1.0)
            if code < 0:
                return f"its process was killed by {signal.Signals(-code).name}"
            return f"its process ended with exit code {code}"
        return "its process closed its connection"

    def trouble(self) -> str | None:
        now, stopped = time.monotonic(), {}
        for rank, process in enumerate(self._processes):
            if _is_stopped(process.pid):
                stopped[rank] = self._stopped.get(rank, now)
        self._stopped = stopped
        for rank, since in stopped.items():
            if now - since >= _STOPPED:
                return f"the process of {self.at(rank)} is stopped (SIGSTOP)"
        return None

    def end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
