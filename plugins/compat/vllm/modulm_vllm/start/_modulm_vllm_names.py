"""Makes `import vllm` work if vLLM is not installed.

A `.pth` file installs this finder at every start of Python, so this module imports almost nothing.
It is last on `sys.meta_path`, so an installed vLLM takes precedence.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would take longer than the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Finder", "install"]


class Finder:
    """Finds `vllm` and its submodules in `modulm_vllm.modules`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of `vllm`. Raises ModuleNotFoundError that names a replacement."""
        if name != "vllm" and not name.startswith("vllm."):
            return None
        from modulm_vllm.modules import find

        return find(name)


def install() -> None:
    """Append the finder, so that all others are asked first."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
