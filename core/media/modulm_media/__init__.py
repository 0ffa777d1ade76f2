"""Images, sound and video in prompts: values, the checkpoint's own processor, and where they go.

Nothing here imports torch or transformers before a prompt with media is read.
"""

from modulm_media.family import MediaFamily, Processed
from modulm_media.reader import MediaPrompt, MediaReader
from modulm_media.values import KINDS, Media, Sound, Video

__all__ = [
    "KINDS",
    "Media",
    "MediaFamily",
    "MediaPrompt",
    "MediaReader",
    "Processed",
    "Sound",
    "Video",
]
