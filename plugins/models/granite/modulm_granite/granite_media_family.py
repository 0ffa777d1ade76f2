"""Media family of Granite Speech."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from modulm_granite.processor import SpeechProcessor
from modulm_media import MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["SpeechFamily"]


class SpeechFamily(MediaFamily):
    """Uses the processor's output unchanged."""

    kinds = ("audio",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        if find_spec("torchaudio") is not None:
            return super().open_processor(files)
        token = files.table("processor_config").get("audio_token")
        return SpeechProcessor(files.part("tokenizer"), files.settings("audio_processor"), token)
