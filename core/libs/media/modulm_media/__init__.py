"""Images, audio and video in prompts: values, the checkpoint's processor and placeholders.

Names are imported on first use, because every command reads the flags and needs no arrays.
Importing this package imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_media.family import MediaFamily, Processed
    from modulm_media.grids import GridFamily
    from modulm_media.reader import MediaPrompt, MediaReader
    from modulm_media.values import KINDS, Media, Sound, Video

__all__ = [
    "KINDS",
    "GridFamily",
    "Media",
    "MediaFamily",
    "MediaPrompt",
    "MediaReader",
    "Processed",
    "Sound",
    "Video",
]

_HOMES = {
    "KINDS": "values",
    "GridFamily": "grids",
    "Media": "values",
    "MediaFamily": "family",
    "MediaPrompt": "reader",
    "MediaReader": "reader",
    "Processed": "family",
    "Sound": "values",
    "Video": "values",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
