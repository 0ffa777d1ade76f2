"""Speech to text: how models are asked for it, and what is done with sound and text around that.

Names are loaded on first use: the flags of every command are looked for without numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_speech.transcriber import Alignment, Question, Segment, Transcriber, Wanted, Word

__all__ = ["Alignment", "Question", "Segment", "Transcriber", "Wanted", "Word"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.transcriber"), name)
