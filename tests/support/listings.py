"""The metadata of this environment's packages, read once.

Tests make hundreds of plugin managers, in this process and in forks of it. Each lists what is
installed, which takes a tenth of a second for all packages of this repository.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, cached_property, lru_cache
from importlib.metadata import Distribution, EntryPoints, distributions

from modulm.plugins import drivers

_ENVIRONMENT = sysconfig.get_path("purelib")


class _Known:
    """A distribution whose files are read once."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self.read_text = cache(distribution.read_text)

    @cached_property
    def entry_points(self) -> EntryPoints:
        return self._distribution.entry_points

    @cached_property
    def identity(self) -> tuple[str, str]:
        return _parse_identity(self._distribution)


_parse_identity = drivers._identity


def _identity(distribution: _Known | Distribution) -> tuple[str, str]:
    known = isinstance(distribution, _Known)
    return distribution.identity if known else _parse_identity(distribution)


@lru_cache(maxsize=1)
def _known(changed: int) -> tuple[_Known, ...]:
    """The environment's distributions; `changed` is when one was last installed or removed."""
    return tuple(map(_Known, distributions(path=[_ENVIRONMENT])))


def _distributions() -> Iterator[_Known | Distribution]:
    for folder in sys.path:
        if folder == _ENVIRONMENT:
            yield from _known(os.stat(folder).st_mtime_ns)
        else:
            yield from distributions(path=[folder])


def share() -> None:
    """Let plugin managers of this process, and of its forks, read each package's metadata once."""
    drivers.distributions = _distributions  # type: ignore[assignment]
    drivers._identity = _identity  # type: ignore[assignment]
    for _ in drivers.installed():
        pass
