"""Text to speech: how models are prompted to speak, and how they give frames of sound.

Names are imported on first use: prompts and sound files need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_speakers.model import CODES, SpeakingModel
    from modulm_speakers.speaker import Answer, Speaker, Utterance

__all__ = ["CODES", "Answer", "Speaker", "SpeakingModel", "Utterance"]

_MODULES = dict.fromkeys(("CODES", "SpeakingModel"), "model")
_MODULES |= dict.fromkeys(("Answer", "Speaker", "Utterance"), "speaker")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
