"""Speech to text: prompts for models, and the processing of audio and text around them.

Names are imported on first use, because every command reads the flags and needs no numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_speech.transcriber import (
        Alignment,
        Emitted,
        Question,
        Segment,
        Transcriber,
        Wanted,
        Word,
    )

__all__ = ["Alignment", "Emitted", "Question", "Segment", "Transcriber", "Wanted", "Word"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.transcriber"), name)
