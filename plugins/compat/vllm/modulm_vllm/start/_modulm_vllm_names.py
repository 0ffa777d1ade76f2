"""`import vllm`, if nobody else answers to that name.

A `.pth` file installs this finder when Python starts, so this module imports next to nothing. It
comes last of all: a vLLM that is installed, in whatever way, is found before it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Finder", "install"]


class Finder:
    """Finds `vllm` and what is under it in `modulm_vllm.modules`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError that says what modulm has instead of a part that is missing.
        A part of a vLLM that is really there is none of ours.
        """
        if name != "vllm" and not name.startswith("vllm."):
            return None
        from modulm_vllm.modules import find

        return find(name)


def install() -> None:
    """Ask this finder when all others have found nothing."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
