"""The age of what is stored, which no jump of the wall clock changes."""

from __future__ import annotations

import time
from pathlib import Path

from attrs import define, field

__all__ = ["Clock", "Moment"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Seconds for which the wall clock must say that something is over if only it can tell.
_GRACE = 3_600


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@define
class Clock:
    """The clocks of this machine.

    boot: names the machine's current start, during which `uptime` counts on; empty if unknown.
    """

    boot: str = field(factory=_boot)

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        return time.time()

    def uptime(self) -> float:
        """Seconds since the machine started, with those asleep; never jumps."""
        if hasattr(time, "CLOCK_BOOTTIME"):
            return time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic()

    def now(self) -> Moment:
        """This moment."""
        return Moment(int(self.wall() * 1e9), self.boot, self.uptime())


@define
class Moment:
    """When something was created.

    made: in nanoseconds of Unix time. boot, uptime: the same by the clock of the machine's start.
    """

    made: int
    boot: str = ""
    uptime: float = 0.0
    _overdue_since: float | None = field(default=None, init=False, repr=False)

    def is_over(self, lasts: float, clock: Clock) -> bool:
        """Whether `lasts` seconds have gone by.

        During the same start of the machine its uptime tells. Afterwards, or on another machine,
        only the wall clock can: it must say so for an hour, in which a wrong one is set right.
        """
        uptime = clock.uptime()
        if self.boot and self.boot == clock.boot and uptime >= self.uptime:
            return uptime >= self.uptime + lasts
        if clock.wall() < self.made / 1e9 + lasts:
            self._overdue_since = None
            return False
        if self._overdue_since is None:
            self._overdue_since = uptime
        return uptime >= self._overdue_since + _GRACE
