"""The version: that of vLLM's names and modulm's own, `0.13.0+modulm.0.1.0`."""

from __future__ import annotations

from modulm import __version__ as _own

__all__ = ["__version__", "__version_tuple__"]

_FOLLOWED = (0, 13, 0)

__version__ = f"{'.'.join(map(str, _FOLLOWED))}+modulm.{_own}"
__version_tuple__ = (*_FOLLOWED, f"modulm.{_own}")
