"""Media families of MOSS-Audio and Fun-Audio-Chat: Whisper's spectrogram, without a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["FunAudioChatFamily", "MossAudioFamily"]

#: MOSS-Audio's settings of spectrograms, and transformers' names of them.
_MEL = {
    "mel_dim": "feature_size", "mel_sr": "sampling_rate", "mel_hop_length": "hop_length",
    "mel_n_fft": "n_fft",
}  # fmt: skip
#: Seconds between the times that MOSS-Audio writes among tokens, and frames of a token.
_EVERY, _MERGED = 2, 8


@frozen(eq=False)
class Hearing:
    """The tokenizer and transformers' feature extractor. ids: of start, audio and end, if the files
    have them. times: whether times are written among tokens.
    """

    tokenizer: Any
    feature_extractor: Any
    ids: tuple[int, int, int] = (-1, -1, -1)
    times: bool = False

    def spectrogram(self, sound: Sound) -> Mapping[str, np.ndarray]:
        """`input_features` [1, bins, frames] and `attention_mask` [1, frames] of a sound, which is
        neither filled up nor cut.
        """
        outputs: Mapping[str, np.ndarray] = self.feature_extractor(
            sound.samples, sampling_rate=sound.rate, padding="longest", truncation=False,
            return_attention_mask=True, return_tensors="np",
        )  # fmt: skip
        return outputs


class _Heard(MediaFamily):
    """Sounds between two tokens."""

    kinds = ("audio",)
    token: ClassVar[str] = "<|AUDIO|>"
    ends: ClassVar[tuple[str, str]] = ("<|audio_bos|>", "<|audio_eos|>")

    def mark(self, kind: str) -> str:
        return self.token

    def document(self, kind: str, is_only_item: bool) -> str:
        return self.token.join(self.ends)

    def hear(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """The spectrogram of an item. Raises RequestError, ValueError."""
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        extractor = self.processor.feature_extractor
        sound = media.value.at(self.rate)
        least = max(0, int(extractor.n_fft) - len(sound.samples))
        sound = Sound(np.pad(sound.samples, (0, least)), self.rate)
        heard: Mapping[str, np.ndarray] = self.processor.spectrogram(sound)
        return {**heard, "samples": np.array([len(sound.samples)])}


class FunAudioChatFamily(_Heard):
    """Fun-Audio-Chat: 25 frames per second, of which a group is a token."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return Hearing(files.part("tokenizer"), files.part("feature_extractor"))

    def features(self, kind: str) -> Sequence[int]:
        number = self.config.get("audio_token_index", self.config.get("audio_token_id"))
        if number is None:
            number = self.processor.tokenizer.convert_tokens_to_ids(self.token)
        return (int(number),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        heard = self.hear(media, options)
        frames = max(1, int(heard["samples"][0] / self.rate * 25))
        group = int((self.config.get("audio_config") or {}).get("group_size", 5))
        count = -(-frames // group)
        return {
            "input_ids": [list(self.features(media.kind)) * count],
            "input_features": heard["input_features"],
            "feature_attention_mask": heard["attention_mask"],
            "tokens": np.array([count], np.int64),
        }


class MossAudioFamily(_Heard):
    """MOSS-Audio: 12.5 tokens per second; files may ask for the time every two seconds.

    Published tokenizers lack the placeholder's tokens, so that it is found in the text.
    """

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import WhisperFeatureExtractor

        written = {**files.table("preprocessor_config"), **files.table("processor_config")}
        mel = dict(written.get("mel_config") or {})
        settings = {name: mel.get(key, mel.get(name)) for key, name in _MEL.items()}
        settings = {"feature_size": 128, **{k: v for k, v in settings.items() if v is not None}}
        tokenizer = files.part("tokenizer")
        names = (cls.ends[0], cls.token, cls.ends[1])
        known = [tokenizer.convert_tokens_to_ids(name) for name in names]
        missing = (None, tokenizer.unk_token_id)
        defaults = (151669, 151654, 151670)
        keys = ("audio_start_id", "audio_token_id", "audio_end_id")
        ids = [
            int(written.get(key, default if one in missing else one))
            for key, one, default in zip(keys, known, defaults, strict=True)
        ]
        times = bool(written.get("enable_time_marker", False))
        extractor = WhisperFeatureExtractor(**settings)
        return Hearing(tokenizer, extractor, (ids[0], ids[1], ids[2]), times)

    def features(self, kind: str) -> Sequence[int]:
        return (self.processor.ids[1],)

    def mark_tokens(self, kind: str) -> Sequence[int]:
        return self.features(kind)

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        tokenizer, mark = self.processor.tokenizer, self.document("audio", False)
        if (tokens == self.processor.ids[1]).any():
            return tokens, media
        pieces: list[int] = []
        for index, text in enumerate(tokenizer.decode(tokens.tolist()).split(mark)):
            pieces += self.processor.ids if index else ()
            pieces += tokenizer.encode(text, add_special_tokens=False)
        return np.array(pieces, np.int64), media

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        return False

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        heard = self.hear(media, options)
        frames = int(heard["attention_mask"].sum())
        count = frames
        for _ in range(3):
            count = (count + 1) // 2
        return {
            "input_ids": [self._timed(count)],
            "input_features": heard["input_features"][0, :, :frames],
        }

    def _timed(self, count: int) -> list[int]:
        """The tokens of an item, with the time in seconds after every two."""
        token = self.processor.ids[1]
        if not self.processor.times:
            return [token] * count
        extractor, tokenizer = self.processor.feature_extractor, self.processor.tokenizer
        pace = extractor.sampling_rate / (extractor.hop_length * _MERGED)
        tokens: list[int] = []
        part = int(pace * _EVERY)
        seconds = range(_EVERY, int(count / pace) + 1, _EVERY)
        for second in seconds:
            tokens += [token] * part
            tokens += [tokenizer.convert_tokens_to_ids(digit) for digit in str(second)]
        return tokens + [token] * (count - part * len(seconds))
